"""The run directory: made once, held by one process, and readable after any crash."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import RunConfig
from common.config_load import validate
from common.errors import ConfigError, ResourceError
from deploy.history import read_history, series, tell
from deploy.run_dir import RunDir, new_run_dir

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(**settings: Any) -> RunDir:
    return new_run_dir(validate({"run_dir": "run", **settings}))[0]


# Making


def test_unnamed_run_is_called_after_time_and_recipe(tmp_path: Path) -> None:
    first, config = new_run_dir(RunConfig(), clock=lambda: 0.0)
    second, _ = new_run_dir(RunConfig(), clock=lambda: 0.0)
    assert first.path.parent == tmp_path / "runs"
    assert first.path.name.endswith("-sao")
    assert second.path.name == first.path.name + "-2"
    assert config.run_dir == str(first.path)


def test_config_is_written_with_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "qwen").mkdir()
    run_dir, config = new_run_dir(
        validate({"run_dir": "run", "data": {"source": "rows.jsonl"}, "model": {"path": "qwen"}, "seed": 5})
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_dir.config() == config
    assert config.data.source == str(tmp_path / "rows.jsonl")
    assert config.model.path == str(tmp_path / "qwen")
    assert config.import_dir == str(tmp_path)
    assert config.seed == 5


def test_names_that_are_no_paths_stay() -> None:
    config = make().config()
    assert config.model.path == "builtin:tiny-sort"
    assert config.data.source == "task:sort-digits"
    assert config.evaluation.source == ""
    missing = make(model={"path": "org/name"}, data={"source": "absent.jsonl"}).config()
    assert (missing.model.path, missing.data.source) == ("org/name", "absent.jsonl")


def test_moved_folder_knows_where_it_is(tmp_path: Path) -> None:
    make().path.rename(tmp_path / "moved")
    assert RunDir(Path("moved")).config().run_dir == str(tmp_path / "moved")


def test_folder_with_a_run_is_refused_with_the_way_to_resume() -> None:
    make().record({"kind": "update", "update": 1})
    with pytest.raises(ConfigError, match="slipstream resume run"):
        make()


def test_folder_with_a_checkpoint_is_refused_too() -> None:
    (make().checkpoints / "20").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        make()


def test_folder_of_a_run_that_never_trained_is_used_again() -> None:
    make(seed=1).record({"kind": "event", "text": "failed: no such file"})
    assert make(seed=2).config().seed == 2


def test_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty and not a run of ours"):
        make()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="file"):
        new_run_dir(validate({"run_dir": "file/run"}))


def test_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        RunDir(tmp_path).config()
    with pytest.raises(ConfigError, match="does not exist"):
        RunDir(tmp_path / "absent").config()


# Lock


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    code = "import sys; from pathlib import Path; from deploy.run_dir import RunDir\n"
    code += f"with RunDir(Path({str(path)!r})).lock():\n    print('locked', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_second_process_is_refused_by_the_name_of_the_first() -> None:
    run_dir = make()
    with hold(run_dir.path) as holder:
        with pytest.raises(ResourceError, match=f"in use by process {holder.pid} on "), run_dir.lock():
            pass
        holder.communicate("")
    with run_dir.lock():  # free again
        assert f"process {os.getpid()}" in (run_dir.path / "lock").read_text()


def test_lock_of_a_killed_process_is_free() -> None:
    run_dir = make()
    with hold(run_dir.path) as holder:
        holder.kill()
        holder.wait()
    with run_dir.lock():
        pass


def test_lock_is_refused_within_the_process_and_freed_by_an_error() -> None:
    run_dir = make()

    def lock_twice() -> None:
        with run_dir.lock(), RunDir(run_dir.path).lock():
            pass

    for _ in range(2):
        with pytest.raises(ResourceError, match="in use"):
            lock_twice()
    with run_dir.lock():
        pass


# Records


def test_records_come_back_in_order() -> None:
    run_dir = make()
    records = [{"kind": "event", "text": "Ünïcode\n→"}, {"kind": "update", "update": 1, "version": 3}]
    for record in records:
        run_dir.record(record)
    assert list(run_dir.records()) == records
    assert run_dir.highest_version() == 3


def test_no_records_yet_is_no_error() -> None:
    assert list(make().records()) == []
    assert make().highest_version() == 0


def test_numbers_that_are_not_finite_are_null_in_the_file() -> None:
    run_dir = make()
    run_dir.record({"kind": "update", "a": math.nan, "b": math.inf, "c": {"d": [1.0, -math.inf]}})
    assert json.loads(run_dir.metrics_file.read_text()) == {
        "kind": "update",
        "a": None,
        "b": None,
        "c": {"d": [1.0, None]},
    }


def test_torn_line_is_left_out_and_does_not_spoil_the_next() -> None:
    run_dir = make()
    run_dir.record({"n": 1})
    with run_dir.metrics_file.open("a") as file:
        file.write('{"n": 2, "tex')
    assert list(run_dir.records()) == [{"n": 1}]
    run_dir.record({"n": 3})
    assert list(run_dir.records()) == [{"n": 1}, {"n": 3}]


def test_half_a_character_at_the_end_is_left_out() -> None:
    run_dir = make()
    run_dir.record({"n": 1})
    with run_dir.metrics_file.open("ab") as file:
        file.write('{"text": "é'.encode()[:-1])
    assert list(run_dir.records()) == [{"n": 1}]


def test_full_disk_is_said_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    run_dir = make()
    run_dir.metrics_file.mkdir()  # cannot be opened for writing
    with caplog.at_level(logging.WARNING):
        run_dir.record({"n": 1})
        run_dir.record({"n": 2})
    assert len(caplog.records) == 1
    assert "metrics are lost, the run goes on" in caplog.text


# History


def update(number: int, time_s: float, outcome: str = "committed", **more: Any) -> dict[str, Any]:
    return {"kind": "update", "update": number, "time_s": time_s, "outcome": outcome, **more}


def test_history_without_interruption_is_the_records() -> None:
    history = tell(
        [update(0, 1.0, "value_warmup"), update(0, 2.0, "value_warmup"), update(1, 3.0), update(1, 4.0, "no_update")]
    )
    assert [record["update"] for record in history.updates] == [0, 0, 1, 1]
    assert (history.completed_updates, history.duration_s, history.starts, history.undone) == (1, 4.0, 1, 0)


def test_what_a_restore_took_back_is_left_out() -> None:
    evaluation = {"kind": "evaluation", "update": 3, "time_s": 3.5}
    history = tell([update(1, 1), update(2, 2, kept=False), update(3, 3), evaluation, update(2, 9, kept=True)])
    assert [record["update"] for record in history.updates] == [1, 2]
    assert history.updates[1]["kept"] is True
    assert history.evaluations == []
    assert history.undone == 2


def test_batch_without_update_after_a_restore_takes_back_what_came_later() -> None:
    history = tell([update(1, 1), update(2, 2), update(3, 3), update(1, 9, "no_update")])
    assert [(record["update"], record["outcome"]) for record in history.updates] == [(1, "committed"), (1, "no_update")]


def test_time_goes_on_over_resumes() -> None:
    records = [update(1, 10.0), update(2, 20.0), {"kind": "event", "time_s": 0.5, "text": "ready"}, update(3, 4.0)]
    history = tell(records)
    assert [record["time_s"] for record in history.updates] == [10.0, 20.0, 24.0]
    assert history.events[0]["time_s"] == 20.5
    assert (history.starts, history.duration_s) == (2, 24.0)


def test_record_without_time_has_that_of_its_neighbour() -> None:
    history = tell([update(1, 10.0), {"kind": "event", "text": "failed"}, update(2, 20.0)])
    assert history.events[0]["time_s"] == 10.0
    assert history.starts == 1


def test_evaluation_of_the_same_weights_counts_once() -> None:
    evaluations = [{"kind": "evaluation", "update": 0, "time_s": n, "eval/reward_mean": n} for n in (1.0, 2.0)]
    assert series(tell(evaluations).evaluations, "update", "eval/reward_mean") == ([0.0], [2.0])


def test_series_leaves_out_records_that_lack_a_number() -> None:
    records = [{"x": 1, "y": 2.0}, {"x": 2, "y": None}, {"x": 3}, {"x": 4, "y": 5}]
    assert series(records, "x", "y") == ([1.0, 4.0], [2.0, 5.0])


def test_history_of_an_empty_folder_is_empty(tmp_path: Path) -> None:
    assert read_history(tmp_path).updates == []
