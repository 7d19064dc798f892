"""Checkpoints: a restored learner goes on as if nothing had happened; what is not whole is passed over. F-26."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import ConfigError, ResourceError
from common.types import BatchId, BatchOutcome
from learner.checkpoint import CheckpointStore
from learner.state import read_counters
from learner.update import Learner
from tests.learner_kit import largest_difference, make_config, model_logprobs, random_batch, save_model, weights_of

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("sao", "sao-head", "grpo-dis")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("llama"))
    (folder / "tokenizer.json").write_text('{"added_tokens": []}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_learner(folder: Path, recipe: str = "grpo-dis", *overrides: str) -> Learner:
    return Learner(make_config(recipe, *overrides), folder)


def train(learner: Learner, seeds: Sequence[int]) -> None:
    for seed in seeds:
        size = learner.config.groups.size
        batch = random_batch(np.random.default_rng(seed), learner.policy.model, group_size=size, version=6)
        assert learner.update(batch, 6).outcome is not BatchOutcome.NO_UPDATE


def save(store: CheckpointStore, learner: Learner, batch: int | None = None) -> Path:
    last = None if batch is None else BatchId(batch)
    return store.save(learner, last_finished_batch=last, buffer_state={"cursor": 17})[0]


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    tensors = {**weights_of(learner.policy.model), **learner.optimizer.tensors()}
    if learner.value and learner.value_optimizer:
        tensors |= {f"value/{name}": p.detach() for name, p in learner.value.named_parameters()}
        tensors |= {f"value/{name}": t for name, t in learner.value_optimizer.tensors().items()}
    return tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path, recipe: str, tied: bool) -> None:
    model = save_model(tmp_path / "model", tied=tied)
    learner, restored = make_learner(model, recipe), make_learner(model, recipe)
    train(learner, [0, 1])
    learner.weight_version = 57
    path = save(CheckpointStore(tmp_path / "checkpoints", keep=2), learner, batch=9)

    assert restored.restore(path) == 9
    assert (restored.completed_updates, restored.weight_version) == (2, 57)
    assert restored.value_batches == learner.value_batches
    train(learner, [2, 3])
    train(restored, [2, 3])
    left, right = everything(learner), everything(restored)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_warmup_goes_on_where_it_stopped(tmp_path: Path, folder: Path) -> None:
    learner, restored = (make_learner(folder, "sao", "value.warmup_batches=3") for _ in range(2))
    train(learner, [0, 1])
    restored.restore(save(CheckpointStore(tmp_path, keep=1), learner))
    outcomes = []
    for seed in (2, 3):
        batch = random_batch(np.random.default_rng(seed), restored.policy.model, version=6)
        outcomes.append(restored.update(batch, 6).outcome)
    assert outcomes == [BatchOutcome.VALUE_WARMUP, BatchOutcome.COMMITTED]


def test_learning_rates_are_the_same_with_and_without_a_stop(tmp_path: Path, folder: Path) -> None:
    """F-35."""
    words = ("learner.schedule=cosine", "learner.warmup_updates=2", "max_updates=6")
    learner, restored = make_learner(folder, "grpo-dis", *words), make_learner(folder, "grpo-dis", *words)
    train(learner, [0, 1, 2])
    restored.restore(save(CheckpointStore(tmp_path, keep=1), learner))
    batch = random_batch(np.random.default_rng(9), learner.policy.model, group_size=8, version=6)
    rates = [one.update(batch, 6).metrics["policy/learning_rate"] for one in (learner, restored)]
    assert rates[0] == rates[1]


def test_the_policys_folder_is_a_model_that_anybody_can_load(tmp_path: Path, folder: Path) -> None:
    learner = make_learner(folder)
    train(learner, [0])
    policy = save(CheckpointStore(tmp_path, keep=1), learner) / "policy"
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    assert largest_difference(weights_of(model), weights_of(learner.policy.model)) == 0.0
    np.testing.assert_allclose(model_logprobs(model, [5, 6, 7]), model_logprobs(learner.policy.model, [5, 6, 7]))
    assert (policy / "tokenizer.json").read_text() == '{"added_tokens": []}'
    assert (policy / "chat_template.jinja").exists()


def test_counters_and_the_buffers_state_are_in_the_checkpoint(tmp_path: Path, folder: Path) -> None:
    learner = make_learner(folder)
    learner.weight_version = 3
    counters = read_counters(save(CheckpointStore(tmp_path, keep=1), learner, batch=4))
    assert (counters.weight_version, counters.last_finished_batch) == (3, 4)
    assert counters.buffer_state == {"cursor": 17}


def test_the_newest_stay_and_the_oldest_of_them_says_which_batches_all_hold(tmp_path: Path, folder: Path) -> None:
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=2)
    oldest = []
    for number in range(4):
        learner.completed_updates = number
        last = BatchId(10 + number) if number else None
        oldest.append(store.save(learner, last_finished_batch=last, buffer_state={})[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00000002", "update-00000003"]
    assert store.newest() == tmp_path / "update-00000003"
    assert oldest == [None, None, 11, 12]


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "missing", keep=2).newest() is None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


FILES = ("policy/model.safetensors", "policy/config.json", "value.safetensors", "optimizer.safetensors", "state.json")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in FILES for damage in (truncate, Path.unlink, flip_a_bit)),
        ("complete.json", truncate),
        ("complete.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, folder: Path, file: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """F-26."""
    learner, store = make_learner(folder, "sao"), CheckpointStore(tmp_path, keep=3)
    older = save(store, learner)
    learner.completed_updates = 1
    newer = save(store, learner)
    assert store.newest() == newer
    damage(newer / file)
    with caplog.at_level(logging.WARNING):
        assert store.newest() == older
    assert str(newer) in caplog.text
    assert file in caplog.text
    learner.restore(older)


def test_a_damaged_checkpoint_is_replaced_when_training_gets_there_again(tmp_path: Path, folder: Path) -> None:
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=2)
    path = save(store, learner)
    truncate(path / "state.json")
    assert save(store, learner) == path
    assert store.newest() == path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_checkpoints_of_a_future_that_was_given_up_are_removed_and_the_one_just_saved_stays(
    tmp_path: Path, folder: Path
) -> None:
    """F-26: update 100 is damaged and has its marker, so that training went on from an older one."""
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=1)
    learner.completed_updates = 100
    truncate(save(store, learner, batch=100) / "state.json")
    (tmp_path / "update-best").mkdir()  # somebody's own
    for number in (81, 82):
        learner.completed_updates = number
        saved, oldest_batch = store.save(learner, last_finished_batch=BatchId(number), buffer_state={})
        assert oldest_batch == number
        assert store.newest() == saved
        assert {path.name for path in tmp_path.iterdir()} == {f"update-{number:08d}", "update-best"}


def test_a_replacement_that_broke_off_between_its_renames_is_undone(tmp_path: Path, folder: Path) -> None:
    """Several checkpoints of the same count of updates follow each other while a value model warms up."""
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=1)
    path = save(store, learner, batch=3)
    path.rename(tmp_path / f".aside-{path.name}-replaced")
    assert store.newest() == path
    assert read_counters(save(store, learner, batch=4)).last_finished_batch == 4
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_what_an_interrupted_save_left_is_not_taken_for_a_checkpoint(tmp_path: Path, folder: Path) -> None:
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=2)
    whole = save(store, learner)
    shutil.copytree(whole, tmp_path / ".aside-update-00000005")
    unmarked = tmp_path / "update-00000004"
    shutil.copytree(whole, unmarked)
    (unmarked / "complete.json").unlink()
    assert store.newest() == whole
    learner.completed_updates = 6
    newest = save(store, learner)
    assert store.newest() == newest
    assert not list(tmp_path.glob(".aside-*"))
    assert whole.exists()  # it and the newest are the two complete ones


KILLED_WHILE_SAVING = """
import os, random, signal, sys, time
from pathlib import Path
from tests.learner_kit import make_config
from learner import state
from learner.checkpoint import CheckpointStore
from learner.update import Learner

learner = Learner(make_config("sao"), Path(sys.argv[1]))
store = CheckpointStore(Path(sys.argv[2]), keep=2)
save_file = state.save_file

def slowly(*arguments):
    time.sleep(0.02)
    save_file(*arguments)
    time.sleep(0.02)

state.save_file = slowly
chance = random.Random(0)
began = time.monotonic()
store.save(learner, last_finished_batch=0, buffer_state={})
whole = time.monotonic() - began  # of one save, on a machine that may be busy
for _ in range(10):
    child = os.fork()
    if not child:
        while True:
            store.save(learner, last_finished_batch=learner.completed_updates, buffer_state={})
            learner.completed_updates += 1
    time.sleep(whole * (0.5 + 6 * chance.random()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    learner.restore(store.newest())
    print(learner.completed_updates, flush=True)
"""


def test_killed_at_any_moment_the_newest_whole_checkpoint_is_restored(tmp_path: Path, folder: Path) -> None:
    """F-26: kill -9 at ten moments during saves that are made slow."""
    result = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(folder), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    restored = [int(line) for line in result.stdout.split()]
    assert len(restored) == 10
    assert restored == sorted(restored)  # no save that was finished is lost
    assert restored[-1] > 0
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() == tmp_path / f"update-{restored[-1]:08d}"
    assert make_learner(folder, "sao").restore(tmp_path / f"update-{restored[-1]:08d}") == restored[-1]


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=2)
    older = save(store, learner)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("learner.checkpoint.shutil.disk_usage", lambda path: usage)
    learner.completed_updates = 1
    with pytest.raises(ResourceError, match=r"has 1,000 bytes free, and a checkpoint needs \d"):
        save(store, learner)
    assert list(tmp_path.iterdir()) == [older]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("I/O error: No space (os error 28)")]
)
def test_space_that_runs_out_while_saving_leaves_the_older_ones(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    learner, store = make_learner(folder), CheckpointStore(tmp_path, keep=1)
    older = save(store, learner)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("learner.state.save_file", fail)
    learner.completed_updates = 1
    with pytest.raises(ResourceError, match="bytes free"):
        save(store, learner)
    assert list(tmp_path.iterdir()) == [older]
    assert store.newest() == older


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="checkpoint folder .*file/checkpoints cannot be written to"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints", keep=1), make_learner(folder))


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (("sao",), ("grpo-dis",), "algorithm.value = 'own_model', and the run 'none'"),
        (("grpo-dis", "learner.trainable_layers=1"), ("grpo-dis",), "does not fit: .*embed_tokens"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    tmp_path: Path, folder: Path, saved: Sequence[str], resumed: Sequence[str], message: str
) -> None:
    path = save(CheckpointStore(tmp_path, keep=1), make_learner(folder, *saved))
    with pytest.raises(ConfigError, match=message):
        make_learner(folder, *resumed).restore(path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, folder: Path) -> None:
    path = save(CheckpointStore(tmp_path / "checkpoints", keep=1), make_learner(folder))
    other = save_model(tmp_path / "model", vocab_size=301)
    with pytest.raises(ConfigError, match="does not fit"):
        make_learner(other).restore(path)


def test_changed_settings_are_mentioned_and_accepted(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(CheckpointStore(tmp_path, keep=1), make_learner(folder))
    make_learner(folder, "grpo-dis", "max_updates=500").restore(path)
    assert "settings have changed" in caplog.text
    caplog.clear()
    make_learner(folder, "grpo-dis").restore(path)
    assert "settings have changed" not in caplog.text


def test_a_checkpoint_holds_nothing_that_can_run_code(tmp_path: Path, folder: Path) -> None:
    path = save(CheckpointStore(tmp_path, keep=1), make_learner(folder, "sao"))
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors", ".jinja"}
    json.loads((path / "complete.json").read_text())
    assert dataclasses.is_dataclass(read_counters(path))
