"""Whole runs on real Ray and real vLLM: the good path, resuming, and what each failure does."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.publications import publication_files
from common.types import DropReason
from learner.tiny_model import TinySettings, prepare_tiny_model
from tests.run_kit import SMALL, Run, records, trained_rows

pytestmark = [pytest.mark.ray, pytest.mark.engine]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny_model(0, tmp_path_factory.mktemp("models"), print, TinySettings(steps=20))


def train(model_folder: Path, run_dir: Path, *words: str) -> Run:
    return Run("train", *SMALL, f"model.path={model_folder}", f"run_dir={run_dir}", *words)


def updates(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in records(run_dir, "update") if record["outcome"] == "committed"]


def test_a_run_trains_evaluates_archives_and_goes_on_when_resumed(model_folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = train(
        model_folder, run_dir, "recipe=sao-head", "max_updates=4", "value.warmup_batches=1", "rollout.num_actors=2"
    )
    status, output = run.finish()
    assert status == 0, output
    assert [record["update"] for record in updates(run_dir)] == [1, 2, 3, 4]
    assert [record["version"] for record in updates(run_dir)] == [1, 2, 3, 4]
    assert records(run_dir, "update")[0]["outcome"] == "value_warmup"
    evaluations = records(run_dir, "evaluation")
    assert [(e["update"], e["version_oldest"], e["version_newest"]) for e in evaluations] == [(0, 0, 0), (4, 4, 4)]
    assert [e["eval/count"] for e in evaluations] == [16, 16]
    rows = list(trained_rows(run_dir))
    assert len({row["sample_id"] for row in rows}) == len(rows) == 5 * 16
    assert (run_dir / "report.html").stat().st_size > 10_000

    status, output = Run("resume", str(run_dir), "max_updates=6").finish()
    assert status == 0, output
    assert [record["update"] for record in updates(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert [record["version"] for record in updates(run_dir)] == [1, 2, 3, 4, 5, 6]
    rows = list(trained_rows(run_dir))
    assert len({row["sample_id"] for row in rows}) == len(rows) == 7 * 16  # no sample id is used again
    assert len({row["prompt_id"] for row in rows}) == len(rows)  # nor is a prompt, within the epoch
    assert (
        min(version for row in rows if row["batch_id"] >= 5 for version in row["weight_versions"] if version >= 0) >= 4
    )

    status, output = Run("rollouts", str(run_dir), "--last", "3", "--json").finish()
    assert status == 0, output


def test_killed_actor_and_killed_learner_are_replaced_and_nothing_is_trained_twice(
    model_folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = (
        "recipe=grpo-dis",
        "groups.size=4",
        "max_updates=60",
        "checkpoint.every_updates=5",
        "evaluation.num_prompts=0",
        "groups.max_uninformative_batches=0",  # a model that knows nothing gets equal rewards
    )
    run = train(model_folder, run_dir, *words)
    run.wait_for(lambda: len(updates(run_dir)) >= 8)
    run.note_children()
    kill(run, "RolloutActorService")
    before = len(updates(run_dir))
    run.wait_for(lambda: len(updates(run_dir)) >= before + 4)
    kill(run, "LearnerService")
    status, output = run.finish()
    assert status == 0, output
    events = "\n".join(record["text"] for record in records(run_dir, "event"))
    assert "actor-0 died" in events
    assert "learner died" in events
    assert "restored from" in events
    versions = [record["version"] for record in updates(run_dir)]
    assert versions == sorted(set(versions))  # a label never goes back, and none is used twice
    last = records(run_dir, "update")[-1]
    assert last["update"] == 60
    assert_balanced(last)


def test_engine_that_never_works_ends_the_run_with_its_error(model_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in model_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModelForCausalLM"]}))
    run = train(broken, tmp_path / "run", "supervision.max_restarts=1", "supervision.restart_backoff_s=0")
    status, output = run.finish()
    assert status != 0
    assert "NoSuchModelForCausalLM" in output.strip().splitlines()[-1]


def test_a_reward_that_cannot_be_imported_is_one_line_that_names_it(model_folder: Path, tmp_path: Path) -> None:
    run = train(model_folder, tmp_path / "run", "reward.function=nowhere:score")
    status, output = run.finish()
    assert status == 2, output
    assert "nowhere" in output.strip().splitlines()[-1]
    assert "Traceback" not in output


def test_sigterm_saves_ends_every_process_and_can_be_resumed(model_folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = train(model_folder, run_dir, "recipe=sao-head", "value.warmup_batches=0", "max_updates=500")
    run.wait_for(lambda: len(updates(run_dir)) >= 3)
    assert len(run.note_children()) > 5
    assert publication_files(Path("/dev/shm"), run_dir)
    run.process.send_signal(signal.SIGTERM)
    status, output = run.finish(60)
    assert status == 128 + signal.SIGTERM, output
    assert run.survivors() == []
    done = updates(run_dir)[-1]["update"]
    assert (run_dir / "checkpoints" / f"update-{done:08d}").is_dir()
    assert f"slipstream resume {run_dir}" in output
    assert publication_files(Path("/dev/shm"), run_dir) == []


def test_killed_driver_leaves_no_process_and_the_run_goes_on_without_using_a_label_or_an_id_twice(
    model_folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run = train(model_folder, run_dir, "recipe=sao-head", "value.warmup_batches=0", "max_updates=500")
    run.wait_for(lambda: len(updates(run_dir)) >= 1)
    run.note_children()
    run.process.kill()
    run.finish(10)
    agents = "Agent"  # Ray's own: they try for a minute to report that their node is gone, before they end too
    assert [left for left in run.survivors() if agents not in left] == []

    before, archived = updates(run_dir), {row["sample_id"] for row in trained_rows(run_dir)}
    assert not list((run_dir / "checkpoints").glob("update-*"))
    status, output = Run("resume", str(run_dir), "max_updates=2").finish()
    assert status == 0, output
    after = updates(run_dir)[len(before) :]
    assert [record["update"] for record in after] == [1, 2]
    assert after[0]["version"] > before[-1]["version"] + 1  # the starting weights have a label of their own, too
    samples = [row["sample_id"] for row in trained_rows(run_dir)]
    assert len(set(samples)) == len(samples) >= len(archived) + 2 * 16


def test_no_update_ever_ends_the_run_and_says_why(model_folder: Path, tmp_path: Path) -> None:
    """Every token is outside a band of width 0: nothing can be learned."""
    run_dir = tmp_path / "run"
    words = ("recipe=grpo-dis", "groups.size=4", "algorithm.eps_low=0", "algorithm.eps_high=0")
    status, output = train(model_folder, run_dir, *words, "buffer.max_no_update_in_a_row=2").finish()
    assert status == 1, output
    assert re.search(r"error: \d batches in a row brought no update", output.strip().splitlines()[-1])
    assert updates(run_dir) == []


def kill(run: Run, service: str) -> None:
    """kill -9 the process of a service."""
    for child in run.children:
        if child.is_running() and service in " ".join(child.cmdline()):
            child.kill()
            return
    raise AssertionError(f"no process of {service} among {[psutil.Process(c.pid).cmdline() for c in run.children]}")


def assert_balanced(record: dict[str, Any]) -> None:
    """The ledger's equation."""
    states = ("queued", "leased", "assembling", "ready", "in_training", "trained")
    dropped = sum(record.get(f"buffer/dropped_{reason.value}", 0) for reason in DropReason)
    assert record["buffer/issued"] == sum(record[f"buffer/{state}"] for state in states) + dropped
