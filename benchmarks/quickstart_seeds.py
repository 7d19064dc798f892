"""Held-out accuracy and wall time of the quick start, by recipe and seed.

Every run is the `slipstream train` command in a process of its own, one after the other, on an otherwise idle machine.
The starting models of all seeds are made first, so that the times are those of a warm cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import save, show
from learner.model_cache import default_cache_dir
from learner.models import TINY_SORT, resolve_model

RECIPES = ("sao", "sao-head", "grpo-dis")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("settings", nargs="*", help="further settings, e.g. max_updates=60")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        resolve_model(TINY_SORT, seed=seed, cache_dir=default_cache_dir(), report=print)
    rows = [measure(recipe, seed, arguments.settings) for recipe in arguments.recipes for seed in arguments.seeds]
    show("quick start", [{name: str(value) for name, value in row.items()} for row in rows])
    for recipe in arguments.recipes:
        of_recipe = [row for row in rows if row["recipe"] == recipe]
        worst, times = min(row["held_out_after"] for row in of_recipe), [row["wall_s"] for row in of_recipe]
        print(f"{recipe}: worst accuracy {worst:.3f}, median wall time {statistics.median(times):.0f} s")
    print(f"written to {save('quickstart_seeds', {'runs': rows})}")


def measure(recipe: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """One run in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = ["--config", "quickstart", f"recipe={recipe}", f"seed={seed}", f"run_dir={run_dir}", *settings]
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "deploy.cli", "train", *words], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - started
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record["eval/reward_mean"] for record in records if record["kind"] == "evaluation"]
    updates = [record for record in records if record["kind"] == "update"]
    training_s = updates[-1]["time_s"] - updates[0]["time_s"]
    row = {
        "recipe": recipe,
        "seed": seed,
        "held_out_before": evaluations[0],
        "held_out_after": evaluations[-1],
        "updates": updates[-1]["update"],
        "wall_s": round(wall_s, 1),
        "first_commit_s": next(record["time_s"] for record in updates if record["outcome"] == "committed"),
        "trajectories_per_s": round(sum(record["batch/trajectories"] for record in updates[1:]) / training_s, 1),
        "staleness_mean": round(statistics.mean(record["staleness/mean"] for record in updates), 2),
        "staleness_max": max(record["staleness/max"] for record in updates),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
