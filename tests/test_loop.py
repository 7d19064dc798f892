"""The learner between two batches, with fakes all around it: in which order it speaks to whom, and when it saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from common.types import Batch, BatchId, BatchOutcome, WeightVersion
from common.weights import WeightManifest
from learner.loop import TrainingLoop
from learner.steps import note_highest_version, read_highest_version
from learner.update import UpdateResult
from tests.fakes import make_manifest
from tests.learner_kit import make_config

C, N, W = BatchOutcome.COMMITTED, BatchOutcome.NO_UPDATE, BatchOutcome.VALUE_WARMUP


class World:
    """Learner, publisher, checkpoints and buffer in one, with a list of what happened.

    Args:
        outcomes: of the batches, in their order; the last one ends the data.
        checkpoint: updates, weight version and last finished batch of the newest one.
        label: what the buffer answers to a restore; none: the checkpoint's.
    """

    num_parameters, num_trainable = 10, 4

    def __init__(
        self,
        run_dir: Path,
        *outcomes: BatchOutcome,
        checkpoint: tuple[int, int, int] | None = None,
        label: int | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.outcomes = list(outcomes)
        self.checkpoint = checkpoint
        self.label = label
        self.oldest_kept: BatchId | None = None
        self.events: list[Any] = []
        self.completed_updates = 0
        self.weight_version = 0
        self._next_batch = 0 if checkpoint is None else checkpoint[2] + 1

    def loop(self, *words: str) -> TrainingLoop:
        world: Any = self
        return TrainingLoop(make_config("grpo-dis", *words), world, world, self.store, world, self.run_dir)

    # As a learner

    def restore(self, *arguments: Any) -> Any:
        """Of the learner with a folder; of the buffer with a batch and a version."""
        if isinstance(arguments[0], Path):
            assert self.checkpoint is not None
            self.completed_updates, self.weight_version, last = self.checkpoint
            return BatchId(last)
        self.events.append(("restore", *arguments))
        return WeightVersion(arguments[1] if self.label is None else self.label)

    def update(self, trajectories: Any, version: int) -> UpdateResult:
        outcome = self.outcomes.pop(0)
        self.completed_updates += outcome is C
        self.events.append(("update", version))
        return UpdateResult(outcome=outcome, metrics={"policy/loss": 0.5}, reason="nan" if outcome is N else "")

    # As a publisher

    def publish(self, version: int, learner: Any) -> WeightManifest:
        assert learner is self
        self.events.append(("publish", version))
        return make_manifest(version)

    def close(self) -> None:
        self.events.append("closed")

    # As a buffer

    def take_batch(self, wait_s: float) -> Batch | None:
        if not self.outcomes:
            return None
        batch_id, self._next_batch = BatchId(self._next_batch), self._next_batch + 1
        version = WeightVersion(self.weight_version)
        return Batch(batch_id=batch_id, version=version, trajectories=(), is_last=len(self.outcomes) == 1)

    def announce(self, manifest: WeightManifest) -> None:
        self.events.append(("announce", manifest.version, f"on disk: {read_highest_version(self.run_dir)}"))

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        self.events.append(("finish", batch_id, outcome, version))

    def state(self) -> Mapping[str, Any]:
        return {"cursor": self._next_batch}

    def forget_batches_up_to(self, batch_id: BatchId) -> None:
        self.events.append(("forget", batch_id))

    # As a store of checkpoints

    @property
    def store(self) -> Any:
        return Store(self)


class Store:
    def __init__(self, world: World) -> None:
        self._world = world

    def newest(self) -> Path | None:
        return None if self._world.checkpoint is None else Path("checkpoints/old")

    def save(
        self, learner: Any, *, last_finished_batch: BatchId | None, buffer_state: Mapping[str, Any]
    ) -> tuple[Path, BatchId | None]:
        assert learner is self._world
        self._world.events.append(("save", last_finished_batch, buffer_state["cursor"]))
        return Path(f"checkpoints/{last_finished_batch}"), self._world.oldest_kept


def started(world: World, *words: str) -> TrainingLoop:
    loop = world.loop(*words)
    loop.start()
    world.events.clear()
    return loop


def saves(world: World) -> list[int | None]:
    """Last finished batches of the checkpoints that were saved."""
    return [event[1] for event in world.events if event[0] == "save"]


def test_a_new_run_publishes_the_starting_model(tmp_path: Path) -> None:
    world = World(tmp_path)
    record = world.loop().start()
    assert world.events == [("restore", None, 0), ("publish", 0), ("announce", 0, "on disk: 0")]
    assert (record.completed_updates, record.version, record.checkpoint) == (0, 0, "")
    assert (record.num_parameters, record.num_trainable) == (10, 4)


def test_a_label_is_on_disk_then_announced_then_the_batch_is_finished_then_saved(tmp_path: Path) -> None:
    """F-26: whatever dies after the announcement, the label is known to be used."""
    world = World(tmp_path, C)
    record = started(world, "checkpoint.every_updates=1").step(1.0)
    assert world.events == [
        ("update", 0),
        ("publish", 1),
        ("announce", 1, "on disk: 1"),
        ("finish", 0, C, 1),
        ("save", 0, 1),
    ]
    assert record is not None
    assert (record.outcome, record.completed_updates, record.version, record.is_last) == (C, 1, 1, True)
    assert record.checkpoint == "checkpoints/0"
    assert record.metrics["policy/loss"] == 0.5
    assert {"time/wait_s", "time/update_s", "time/publish_s"} <= set(record.metrics)


@pytest.mark.parametrize("outcome", [N, W])
def test_a_batch_that_leaves_the_policy_as_it_was_publishes_nothing(tmp_path: Path, outcome: BatchOutcome) -> None:
    world = World(tmp_path, outcome)
    record = started(world).step(1.0)
    assert world.events == [("update", 0), ("finish", 0, outcome, 0)]
    assert record is not None
    assert (record.outcome, record.completed_updates, record.version) == (outcome, 0, 0)
    assert record.reason == ("nan" if outcome is N else "")


def test_without_a_batch_nothing_happens(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert started(world).step(0.0) is None
    assert world.events == []


def test_a_restored_learner_publishes_under_the_label_the_buffer_gives_it(tmp_path: Path) -> None:
    world = World(tmp_path, C, checkpoint=(20, 22, 24), label=31)
    loop = world.loop()
    record = loop.start()
    assert world.events == [("restore", 24, 22), ("publish", 31), ("announce", 31, "on disk: 31")]
    assert (record.completed_updates, record.version, record.checkpoint) == (20, 31, "checkpoints/old")
    loop.step(1.0)
    assert world.events[-1] == ("finish", 25, C, 32)


def test_checkpoints_are_due_by_finished_batches_so_that_a_long_warmup_is_saved(tmp_path: Path) -> None:
    world = World(tmp_path, W, W, W, N, C, C, C)
    loop = started(world, "checkpoint.every_updates=2")
    records = [loop.step(1.0) for _ in range(7)]
    assert saves(world) == [1, 3, 5]
    assert [bool(record and record.checkpoint) for record in records] == [False, True] * 3 + [False]


def test_without_a_period_nothing_is_saved_until_asked(tmp_path: Path) -> None:
    world = World(tmp_path, C, C)
    loop = started(world, "checkpoint.every_updates=0")
    loop.step(1.0)
    loop.step(1.0)
    assert saves(world) == []
    assert loop.save() == "checkpoints/1"
    assert saves(world) == [1]


def test_what_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    world = World(tmp_path, W, W)
    loop = started(world)
    assert loop.save() == "checkpoints/None"  # the starting model
    assert loop.save() == "checkpoints/None"
    assert saves(world) == [None]
    loop.step(1.0)  # no update, but the value model has learned
    assert loop.save() == loop.save() == "checkpoints/0"
    assert saves(world) == [None, 0]


def test_a_restored_learner_need_not_save_what_it_was_restored_from(tmp_path: Path) -> None:
    world = World(tmp_path, C, checkpoint=(20, 22, 24))
    loop = started(world)
    assert loop.save() == "checkpoints/old"
    assert saves(world) == []
    loop.step(1.0)
    assert loop.save() == "checkpoints/25"


def test_batches_that_every_checkpoint_covers_may_be_forgotten(tmp_path: Path) -> None:
    world = World(tmp_path, C, C)
    loop = started(world, "checkpoint.every_updates=1")
    loop.step(1.0)
    assert not [event for event in world.events if event[0] == "forget"]
    world.oldest_kept = BatchId(0)
    loop.step(1.0)
    assert world.events[-1] == ("forget", 0)


def test_closing_removes_the_publications(tmp_path: Path) -> None:
    world = World(tmp_path)
    started(world).close()
    assert world.events == ["closed"]


def test_the_highest_label_never_goes_back(tmp_path: Path) -> None:
    assert read_highest_version(tmp_path) == 0
    for version, highest in ((0, 0), (7, 7), (12, 12), (3, 12)):
        note_highest_version(tmp_path, WeightVersion(version))
        assert read_highest_version(tmp_path) == highest
    assert [path.name for path in tmp_path.iterdir()] == ["highest_version"]
