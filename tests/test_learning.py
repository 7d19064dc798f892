"""The configurations that come along do what they promise: whole runs, minutes each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_kit import Run, records, trained_rows

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def run(run_dir: Path, *words: str) -> list[float]:
    """Train; held-out rewards in order."""
    status, output = Run("train", "--config", *words, f"run_dir={run_dir}").finish(limit_s=1500)
    assert status == 0, output
    return [record["eval/reward_mean"] for record in records(run_dir, "evaluation")]


@pytest.mark.parametrize("recipe", ["sao", "sao-head", "grpo-dis", "grpo"])
def test_quickstart_learns_to_sort(recipe: str, tmp_path: Path) -> None:
    held_out = run(tmp_path / "run", "quickstart", f"recipe={recipe}")
    assert held_out[0] <= 0.6
    assert held_out[-1] >= 0.95


@pytest.mark.parametrize("recipe", ["grpo-dis", "sao-head"])
def test_smollm2_learns_to_add(recipe: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    held_out = run(run_dir, "smollm2-sums", f"recipe={recipe}")
    rewards = [record["batch/reward_mean"] for record in records(run_dir, "update") if record["outcome"] == "committed"]
    assert len(rewards) == 12
    assert max(sum(rewards[start : start + 3]) / 3 for start in range(9)) >= sum(rewards[:3]) / 3 + 0.3
    assert held_out[-1] >= held_out[0] + 0.3
    trained = {row["prompt_id"] for row in trained_rows(run_dir)}
    assert len(trained) <= 65  # the other 16 pairs are held out
