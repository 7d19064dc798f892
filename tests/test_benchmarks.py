"""Benchmarks: that they run, and that what they print is what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import save
from benchmarks.rollout_throughput import SCENARIOS, Round, rows, summary

ROOT = Path(__file__).parent.parent
LIMIT_S = 280.0


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ratio_is_the_median_over_neighbours_in_time() -> None:
    def of(*seconds: float) -> list[Round]:
        return [Round(tokens=100, seconds=s, cpu_seconds=0.05) for s in seconds]

    rounds = {"actor": of(2.0, 4.0, 1.0), "bare": of(1.0, 1.0, 0.75), "bare, unseeded": of(0.5, 1.0, 1.0)}
    result = summary(SCENARIOS[0], rounds)
    assert result["ratios"] == [0.5, 0.25, 0.75]
    assert result["ratio"] == 0.5
    assert result["tokens_per_s"] == {"actor": 50.0, "bare": 100.0, "bare, unseeded": 100.0}
    assert result["cpu_ms_per_1000_tokens"]["actor"] == 500.0
    table = rows(result)
    assert [row["to bare"] for row in table] == ["0.500 (0.25 to 0.75)", "", ""]
    assert [row["tokens/s"] for row in table] == ["50", "100", "100"]
    assert [row["best"] for row in table] == ["100", "133", "200"]


def test_result_is_saved_with_where_it_was_measured(tmp_path: Path) -> None:
    path = save("some_benchmark", {"rows": [1, 2]}, tmp_path / "new")
    record = json.loads(path.read_text())
    assert path.name == "some_benchmark.json"
    assert (record["benchmark"], record["rows"]) == ("some_benchmark", [1, 2])
    assert record["machine"]["cores"] >= 1


@pytest.mark.engine
def test_log_probs_of_engine_and_learner_agree_at_every_temperature() -> None:
    output = run("benchmarks.logprob_agreement", "--smoke", "--models", "random")
    assert [f"{t:g}" for t in (0.7, 1.0, 1.3) if f"│ {t:>11g} │    768 │" in output] == ["0.7", "1", "1.3"]


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("scenario", [SCENARIOS[0].name, SCENARIOS[-1].name])
def test_rollout_throughput_runs(scenario: str) -> None:
    output = run("benchmarks.rollout_throughput", "--smoke", "--only", scenario)
    assert "bare, unseeded" in output
