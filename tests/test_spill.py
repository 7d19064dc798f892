"""The store that moves trajectories of finished batches to disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from buffer.replay import ReplayBuffer
from buffer.spill import SpillingStore
from common import wire
from common.errors import ResourceError
from common.types import Batch, BatchId, BatchOutcome, WeightVersion
from tests.buffer_kit import deliver, dropped, lease_all, make_buffer, rollout, sample_ids, train_one


def messages(batch: Batch | None) -> list[bytes]:
    assert batch is not None
    return [wire.encode(trajectory) for trajectory in batch.trajectories]


def train_twice(store: SpillingStore, **settings: int) -> tuple[ReplayBuffer, list[Batch]]:
    """Batches 0 and 1 of two samples each are committed: version 2."""
    buffer = make_buffer(batch_size=2, store=store, **settings)
    batches = []
    for _ in range(2):
        for lease in lease_all(buffer):
            deliver(buffer, lease, [lease.min_weight_version] * (1 + lease.sample_id))
        batches.append(train_one(buffer))
    return buffer, batches


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_what_waits_is_in_memory_and_what_was_trained_is_on_disk(tmp_path: Path) -> None:
    store = SpillingStore(tmp_path / "finished")
    buffer, _ = train_twice(store)
    assert files(tmp_path / "finished") == ["batch-00000000.bin", "batch-00000001.bin"]
    counts = buffer.ledger()
    assert len(store._payloads) == counts.ready == 8  # live: 10, of which two are to be leased anew
    assert counts.trained == 4


def test_a_restore_reads_back_every_byte_and_the_file_goes_when_it_is_covered(tmp_path: Path) -> None:
    buffer, batches = train_twice(SpillingStore(tmp_path))
    buffer.restore(None, WeightVersion(0))
    again = buffer.take_batch()
    assert messages(again) == messages(batches[0])
    assert again is not None
    buffer.finish(again.batch_id, BatchOutcome.COMMITTED, WeightVersion(4))
    assert files(tmp_path) == ["batch-00000000.bin", "batch-00000001.bin"]  # they are where they were
    assert messages(train_one(buffer)) == messages(batches[1])
    buffer.forget_batches_up_to(BatchId(2))
    assert files(tmp_path) == ["batch-00000001.bin"]
    buffer.forget_batches_up_to(BatchId(3))
    assert files(tmp_path) == []


def test_what_comes_back_and_is_dropped_as_stale_leaves_the_disk(tmp_path: Path) -> None:
    buffer, _ = train_twice(SpillingStore(tmp_path), staleness_bound=1)
    buffer.note_published(WeightVersion(9))
    assert buffer.restore(None, WeightVersion(0)) == 10
    buffer.take_batch()
    assert dropped(buffer)["stale"] >= 4
    assert files(tmp_path) == []


def test_batches_without_update_are_moved_too_and_members_dropped_before_are_not(tmp_path: Path) -> None:
    buffer = make_buffer(batch_size=3, group_size=3, store=SpillingStore(tmp_path))
    first, *others = buffer.lease("actor-0", 3)
    deliver(buffer, first, reward=None)
    deliver(buffer, others)
    batch = buffer.take_batch()
    assert batch is not None
    buffer.finish(batch.batch_id, BatchOutcome.NO_UPDATE, WeightVersion(0))
    assert (tmp_path / "batch-00000000.bin").read_bytes() == b"".join(messages(batch))
    buffer.restore(None, WeightVersion(0))
    assert sample_ids(buffer.take_batch()) == [1, 2]


def test_a_disk_that_cannot_be_written_keeps_the_run_going_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "finished"
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        buffer, batches = train_twice(SpillingStore(folder))
    warnings = [record.getMessage() for record in caplog.records if record.name == "buffer.spill"]
    assert len(warnings) == 1
    assert str(folder) in warnings[0]
    buffer.restore(None, WeightVersion(0))
    assert messages(buffer.take_batch()) == messages(batches[0])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_keeps_the_batch_in_memory_and_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "batch-00000001.bin").symlink_to("/dev/full")
    store = SpillingStore(tmp_path / "new")
    store._folder = tmp_path  # after its clean start, so that the link is still there
    buffer, batches = train_twice(store)
    assert files(tmp_path) == ["batch-00000000.bin"]
    buffer.restore(BatchId(0), WeightVersion(1))
    assert messages(buffer.take_batch()) == messages(batches[1])


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_file_that_cannot_be_read_back_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    buffer, _ = train_twice(SpillingStore(tmp_path))
    path = tmp_path / "batch-00000000.bin"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 4])
    else:
        path.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
    buffer.restore(None, WeightVersion(0))
    with pytest.raises(ResourceError, match=r"batch-00000000\.bin.*newest checkpoint"):
        buffer.take_batch()


def test_files_of_an_earlier_buffer_are_removed_and_strangers_are_left(tmp_path: Path) -> None:
    train_twice(SpillingStore(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    store = SpillingStore(tmp_path)
    assert files(tmp_path) == ["notes.txt"]
    buffer = make_buffer(batch_size=1, store=store)
    buffer.complete(rollout(buffer.lease("actor-0", 1)[0]))
    train_one(buffer)
    store.close()
    assert files(tmp_path) == ["notes.txt"]
