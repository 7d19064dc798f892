"""Learners that die and are restored, and buffers that start again: what is trained once, and under which label."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer
from common.errors import ConfigError, DataError, RunFailedError, WireError
from common.types import BatchId, BatchOutcome, DropReason, Failure, Lease, WeightVersion
from tests.buffer_kit import (
    CopyingStore,
    FakeClock,
    Rows,
    commit,
    deliver,
    dropped,
    lease_all,
    make_buffer,
    make_settings,
    rollout,
    sample_ids,
    train_one,
)


def trained_twice(**settings: int) -> ReplayBuffer:
    """Batches 0 and 1 of two samples each are committed: version 2."""
    buffer = make_buffer(batch_size=2, **settings)
    for _ in range(2):
        deliver(buffer, lease_all(buffer))
        train_one(buffer)
    return buffer


def test_a_learner_that_dies_before_finish_leaves_its_samples_ready() -> None:
    buffer = make_buffer(batch_size=2)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    ready = buffer.ledger().ready
    assert buffer.restore(None, WeightVersion(0)) == 0
    assert (buffer.ledger().in_training, buffer.ledger().ready) == (0, ready + 2)
    again = buffer.take_batch()
    assert again is not None
    assert batch is not None
    assert sample_ids(again) == sample_ids(batch)
    assert again.batch_id == batch.batch_id + 1
    with pytest.raises(WireError, match="unknown or void"):
        buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(1))  # the dead learner's last words
    assert buffer.snapshot().events.returned_by_restore == 2


def test_samples_of_batches_after_the_checkpoint_are_ready_again_and_counted() -> None:
    buffer = trained_twice()
    before = buffer.ledger()
    buffer.restore(BatchId(0), WeightVersion(1))
    after = buffer.ledger()
    assert (after.trained, after.ready) == (before.trained - 2, before.ready + 2)
    status = buffer.snapshot()
    assert status.events.returned_by_restore == 2
    assert (status.trained.count, status.trained.tokens) == (2, 2)
    assert sorted(sample_ids(train_one(buffer))) == [2, 3]  # oldest version first


def test_a_batch_without_update_comes_back_too() -> None:
    """Its gradient may well be finite with the restored weights."""
    buffer = make_buffer(batch_size=2)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert batch is not None
    buffer.finish(batch.batch_id, BatchOutcome.NO_UPDATE, WeightVersion(0))
    assert buffer.restore(None, WeightVersion(0)) == 0
    assert dropped(buffer) == {}
    assert sample_ids(buffer.take_batch()) == sample_ids(batch)


def test_members_dropped_before_do_not_come_back_with_their_group() -> None:
    buffer = make_buffer(batch_size=3, group_size=3, staleness_bound=4)
    leases = buffer.lease("actor-0", 3)
    deliver(buffer, leases[0], reward=None)
    deliver(buffer, leases[1:])
    train_one(buffer)
    buffer.restore(None, WeightVersion(0))
    assert dropped(buffer) == {"unscorable": 1}
    assert sample_ids(buffer.take_batch()) == [1, 2]


@pytest.mark.parametrize(
    ("announced", "checkpoint", "label"),
    [
        (2, 2, 2),  # the checkpoint is the newest label: the weights are the same
        (2, 1, 3),
        (3, 2, 4),  # version 3 was served and its batch never finished
    ],
)
def test_the_published_label_never_goes_back(announced: int, checkpoint: int, label: int) -> None:
    buffer = trained_twice()
    buffer.note_published(WeightVersion(announced))
    assert buffer.restore(BatchId(checkpoint - 1), WeightVersion(checkpoint)) == label
    status = buffer.snapshot()
    assert (status.version, status.highest_version) == (label, label)
    deliver(buffer, lease_all(buffer))
    assert train_one(buffer).version == label
    assert lease_all(buffer)[0].min_weight_version == label + 1
    with pytest.raises(WireError, match=f"{label + 1} already was"):
        buffer.note_published(WeightVersion(label))


def test_a_label_seen_on_a_token_counts_as_published() -> None:
    buffer = make_buffer(batch_size=2)
    lease = buffer.lease("actor-0", 1)[0]
    deliver(buffer, lease, [0, 1])
    assert buffer.restore(None, WeightVersion(0)) == 2


def test_after_two_restores_labels_still_differ() -> None:
    buffer = trained_twice()
    assert buffer.restore(BatchId(0), WeightVersion(1)) == 3
    assert buffer.restore(BatchId(0), WeightVersion(1)) == 4
    deliver(buffer, lease_all(buffer))
    assert train_one(buffer).version == 4
    assert buffer.snapshot().version == 5


def test_a_restore_voids_the_open_batch() -> None:
    buffer = trained_twice()
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert batch is not None
    buffer.restore(BatchId(1), WeightVersion(2))
    assert buffer.ledger().in_training == 0
    with pytest.raises(WireError):
        buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(3))
    assert set(sample_ids(buffer.take_batch())) == set(sample_ids(batch))


def test_what_a_retained_checkpoint_does_not_cover_cannot_be_forgotten_by_mistake() -> None:
    buffer = trained_twice()
    buffer.forget_batches_up_to(BatchId(0))
    buffer.forget_batches_up_to(BatchId(0))
    assert buffer.snapshot().batches_kept == 1
    assert buffer.restore(BatchId(0), WeightVersion(1)) == 3
    with pytest.raises(RunFailedError, match="the start"):
        buffer.restore(None, WeightVersion(0))


def test_a_checkpoint_of_abandoned_weights_is_refused() -> None:
    """Batch 1 came back and is trained again in batch 2: weights that hold batch 1 would have it twice."""
    buffer = trained_twice()
    buffer.restore(BatchId(0), WeightVersion(1))
    train_one(buffer)
    with pytest.raises(RunFailedError, match="batch 1"):
        buffer.restore(BatchId(1), WeightVersion(2))
    assert buffer.restore(BatchId(2), WeightVersion(4)) == 4


def test_a_checkpoint_from_beyond_this_run_is_refused() -> None:
    with pytest.raises(RunFailedError, match="never got beyond 0"):
        make_buffer().restore(BatchId(16), WeightVersion(17))


def test_payloads_outside_the_byte_limit_come_back_whole() -> None:
    buffer = make_buffer(batch_size=1)
    trajectory = rollout(buffer.lease("actor-0", 1)[0], [0, 0])
    buffer.complete(trajectory)
    train_one(buffer)
    assert buffer.snapshot().held_bytes == 0
    buffer.restore(None, WeightVersion(0))
    assert buffer.snapshot().held_bytes > 0
    batch = buffer.take_batch()
    assert batch is not None
    assert batch.trajectories == (trajectory,)


def test_admission_after_a_restore_counts_what_came_back() -> None:
    """F-25: capacity agrees with what is there, so no burst starts: limit (4 + 1) * 4 = 20."""
    buffer = make_buffer(batch_size=4, staleness_bound=4)
    for _ in range(2):
        deliver(buffer, lease_all(buffer))
        train_one(buffer)
    deliver(buffer, lease_all(buffer))
    assert buffer.snapshot().live_samples == 20
    assert buffer.restore(None, WeightVersion(0)) == 3
    for live in (28, 24, 20):
        assert buffer.snapshot().live_samples == live
        assert lease_all(buffer) == []
        if live > 20:
            train_one(buffer)
    train_one(buffer)  # at version 5, where the 12 that are left of version 0 are too stale
    assert dropped(buffer) == {"stale": 12}
    leases = lease_all(buffer)
    assert (len(leases), {lease.min_weight_version for lease in leases}) == (12 + 4, {6})


# The buffer itself


def fresh(store: CopyingStore, clock: FakeClock, **settings: int) -> ReplayBuffer:
    chosen = make_settings(**settings)
    return ReplayBuffer(chosen, PromptSource(Rows(100), seed=chosen.seed), clock, store)


def test_a_killed_buffer_goes_on_where_it_was() -> None:
    clock, store = FakeClock(), CopyingStore()
    buffer = fresh(store, clock, batch_size=4, group_size=2)
    leases = lease_all(buffer)
    deliver(buffer, leases[:7])
    batch = buffer.take_batch()
    buffer.fail(leases[8].lease_id, Failure(reason=DropReason.FAILED, message="boom"))
    clock.now = 9.0
    before = buffer.snapshot()
    buffer = fresh(store, clock, batch_size=4, group_size=2)
    assert buffer.snapshot().counts == before.counts
    again = buffer.take_batch()
    assert again is not None
    assert batch is not None
    assert (again.batch_id, sample_ids(again)) == (batch.batch_id, sample_ids(batch))
    clock.now = 18.0  # leases that were out have their time anew
    buffer.heartbeat("actor-0", [lease.lease_id for lease in leases[7:]])
    assert buffer.complete(rollout(leases[7])).accepted
    assert buffer.complete(rollout(leases[0])).reason == "duplicate"
    commit(buffer, again)
    assert buffer.snapshot().version == 1
    assert buffer.lease("actor-0", 1)[0].attempt == 1


def test_a_store_of_other_data_or_groups_is_refused() -> None:
    clock, store = FakeClock(), CopyingStore()
    lease_all(fresh(store, clock))
    with pytest.raises(ConfigError, match=r"groups\.size"):
        fresh(store, clock, group_size=2)
    with pytest.raises(DataError, match="seed"):
        fresh(store, clock, seed=8)


@pytest.mark.parametrize("way", ["store", "state"])
def test_every_prompt_is_trained_once_across_stops(way: str) -> None:
    """F-24: 40 prompts, batch 4, 12 ahead, random delays, checkpoint every step, killed after steps 3 and 6."""
    random_delays = random.Random(5)
    clock = FakeClock()
    settings = make_settings(batch_size=4, staleness_bound=2, on_exceeded="wait")
    store: CopyingStore | None = CopyingStore() if way == "store" else None

    def start(state: object) -> ReplayBuffer:
        prompts = PromptSource(Rows(40), seed=settings.seed, epochs=1)
        return ReplayBuffer(settings, prompts, clock, store, state=state)  # type: ignore[arg-type]

    buffer = start(None)
    out: list[Lease] = []
    trained: list[str] = []
    steps: list[int] = []
    while not buffer.end_of_data:
        out += lease_all(buffer)
        random_delays.shuffle(out)
        deliver(buffer, [out.pop() for _ in range(min(len(out), random_delays.randint(1, 6)))])
        batch = buffer.take_batch()
        if batch is None:
            continue
        trained += [trajectory.prompt_id for trajectory in batch.trajectories]
        steps.append(commit(buffer, batch))
        checkpoint = (batch.batch_id, WeightVersion(steps[-1]), buffer.state())
        if steps[-1] in (3, 6):
            deliver(buffer, lease_all(buffer)[:5])  # some of what comes after the checkpoint is lost with the buffer
            buffer = start(checkpoint[2])
            assert buffer.restore(checkpoint[0], checkpoint[1]) == checkpoint[1]
            if way == "state":
                out = []
    assert Counter(trained) == {f"row-{row}": 1 for row in range(40)}
    assert steps == list(range(1, 11))
    assert buffer.ledger().balanced
    assert buffer.ledger().trained == 40


def test_state_is_plain_data_and_carries_the_counts() -> None:
    buffer = trained_twice(staleness_bound=1)
    deliver(buffer, buffer.lease("actor-0", 1), reward=None)
    state = json.loads(json.dumps(buffer.state()))
    again = ReplayBuffer(
        make_settings(batch_size=2, staleness_bound=1), PromptSource(Rows(100), seed=7), FakeClock(), state=state
    )
    counts = again.ledger()
    assert (counts.trained, sum(counts.dropped.values()), counts.issued) == (4, 1, 5)
    assert counts.balanced
    assert again.snapshot().version == 2
    live = {unit.prompt.prompt_id for unit in buffer._assembly.pool.units.values()}
    taken_up = {lease.prompt.prompt_id for lease in lease_all(again)[: len(live)]}
    assert taken_up == live
    assert again.lease("actor-0", 1) == []
