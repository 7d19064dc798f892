"""The replay buffer's main path: from leases to batches, memory, end of data, fatal ends, what is seen from outside."""

from __future__ import annotations

import pytest

from buffer.ledger import size_class
from buffer.replay import ReplayBuffer
from buffer.store import trajectory_bytes
from common.errors import DataError, WireError
from common.types import BatchId, BatchOutcome, DropReason, Failure, Trajectory, WeightVersion
from tests.buffer_kit import (
    PROMPT_TOKENS,
    FakeClock,
    commit,
    deliver,
    dropped,
    lease_all,
    make_buffer,
    rollout,
    sample_ids,
    train_one,
)

ONE_TOKEN_BYTES = trajectory_bytes(PROMPT_TOKENS + 1)


def counts(buffer: ReplayBuffer) -> tuple[int, int, int, int, int, int]:
    ledger = buffer.ledger()
    assert ledger.balanced
    return ledger.queued, ledger.leased, ledger.assembling, ledger.ready, ledger.in_training, ledger.trained


def test_a_single_rollout_goes_from_lease_to_trained() -> None:
    buffer = make_buffer(batch_size=2, staleness_bound=0)
    leases = buffer.lease("actor-0", 2)
    assert counts(buffer) == (0, 2, 0, 0, 0, 0)
    deliver(buffer, leases[0])
    assert counts(buffer) == (0, 1, 0, 1, 0, 0)
    assert buffer.take_batch() is None
    deliver(buffer, leases[1])
    assert counts(buffer) == (0, 0, 0, 2, 0, 0)
    batch = buffer.take_batch()
    assert counts(buffer) == (0, 0, 0, 0, 2, 0)
    assert batch is not None
    assert (batch.batch_id, batch.version, batch.is_last, batch.is_tail) == (0, 0, False, False)
    assert sample_ids(batch) == [0, 1]
    buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(1))
    assert counts(buffer) == (0, 0, 0, 0, 0, 2)
    assert buffer.snapshot().version == 1


def test_a_group_assembles_until_it_is_whole() -> None:
    buffer = make_buffer(batch_size=2, group_size=2)
    first, second = buffer.lease("actor-0", 2)
    deliver(buffer, second)
    assert counts(buffer) == (0, 1, 1, 0, 0, 0)
    deliver(buffer, first)
    assert counts(buffer) == (0, 0, 0, 2, 0, 0)
    assert sample_ids(train_one(buffer)) == [0, 1]


def test_what_was_delivered_is_what_the_learner_gets() -> None:
    buffer = make_buffer(batch_size=1)
    trajectory = rollout(buffer.lease("actor-0", 1)[0], [0, 0, 0], reward=0.25)
    buffer.complete(trajectory)
    batch = buffer.take_batch()
    assert batch is not None
    assert batch.trajectories == (trajectory,)


def test_the_open_batch_is_given_again_until_it_is_finished() -> None:
    buffer = make_buffer(batch_size=2)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert buffer.take_batch() is batch
    commit(buffer, batch)
    again = buffer.take_batch()
    assert again is not None
    assert batch is not None
    assert again.batch_id == batch.batch_id + 1
    assert set(sample_ids(again)).isdisjoint(sample_ids(batch))


def test_finish_is_idempotent_and_refuses_everything_else() -> None:
    buffer = make_buffer(batch_size=1)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert batch is not None
    for outcome, version in [(BatchOutcome.COMMITTED, 0), (BatchOutcome.COMMITTED, 2), (BatchOutcome.NO_UPDATE, 1)]:
        with pytest.raises(WireError, match=f"must leave version .*not {version}"):
            buffer.finish(batch.batch_id, outcome, WeightVersion(version))
    with pytest.raises(WireError, match="batch 7 is unknown"):
        buffer.finish(BatchId(7), BatchOutcome.COMMITTED, WeightVersion(1))
    buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(1))
    buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(1))
    assert (buffer.ledger().trained, buffer.snapshot().version) == (1, 1)
    with pytest.raises(WireError, match="ended as committed at version 1"):
        buffer.finish(batch.batch_id, BatchOutcome.NO_UPDATE, WeightVersion(1))


def test_a_batch_without_update_drops_its_samples_and_moves_nothing() -> None:
    buffer = make_buffer(batch_size=2)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert batch is not None
    buffer.finish(batch.batch_id, BatchOutcome.NO_UPDATE, WeightVersion(0))
    assert dropped(buffer) == {"no_update": 2}
    assert buffer.snapshot().version == 0
    assert set(sample_ids(buffer.take_batch())).isdisjoint(sample_ids(batch))


def test_value_warmup_trains_samples_under_an_unchanged_version() -> None:
    buffer = make_buffer(batch_size=2)
    deliver(buffer, lease_all(buffer))
    batch = buffer.take_batch()
    assert batch is not None
    buffer.finish(batch.batch_id, BatchOutcome.VALUE_WARMUP, WeightVersion(0))
    assert (buffer.ledger().trained, buffer.snapshot().version) == (2, 0)
    assert buffer.snapshot().batches[BatchOutcome.VALUE_WARMUP] == 1


def test_too_many_batches_without_update_in_a_row_end_the_run_with_the_reason() -> None:
    buffer = make_buffer(batch_size=1, max_no_update_in_a_row=2)

    def finish(outcome: BatchOutcome) -> None:
        deliver(buffer, lease_all(buffer))
        batch = buffer.take_batch()
        assert batch is not None
        version = buffer.snapshot().version + (outcome is BatchOutcome.COMMITTED)
        buffer.finish(batch.batch_id, outcome, WeightVersion(version))

    for outcome in (BatchOutcome.NO_UPDATE, BatchOutcome.COMMITTED, BatchOutcome.NO_UPDATE):
        finish(outcome)
        assert buffer.fatal is None
    finish(BatchOutcome.NO_UPDATE)
    assert buffer.fatal is not None
    assert "2 batches in a row brought no update" in buffer.fatal
    assert "buffer.max_no_update_in_a_row" in buffer.fatal
    assert buffer.lease("actor-0", 9) == []
    assert buffer.snapshot().fatal == buffer.fatal


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), float("-inf")])
def test_unscorable_rollout_is_dropped_and_the_others_go_on(reward: float | None) -> None:
    """F-21, single rollouts."""
    buffer = make_buffer(batch_size=1)
    bad, good = buffer.lease("actor-0", 2)
    assert buffer.complete(rollout(bad, reward=reward)).accepted
    deliver(buffer, good)
    assert sample_ids(train_one(buffer)) == [good.sample_id]
    assert dropped(buffer) == {"unscorable": 1}


def test_a_reward_of_zero_is_a_reward() -> None:
    buffer = make_buffer(batch_size=1)
    deliver(buffer, buffer.lease("actor-0", 1), reward=0.0)
    assert train_one(buffer).trajectories[0].reward == 0.0


def test_empty_rollout_is_dropped_and_counted() -> None:
    """F-10: aborted before the first token. A single stop token is an ordinary sample."""
    buffer = make_buffer(batch_size=1)
    empty, stop_only = buffer.lease("actor-0", 2)
    deliver(buffer, empty, [])
    deliver(buffer, stop_only, 0)
    assert sample_ids(train_one(buffer)) == [stop_only.sample_id]
    assert dropped(buffer) == {"empty": 1}


# Memory


def test_the_byte_limit_shuts_the_gate_counting_what_may_still_come() -> None:
    """F-19, memory: room for six of the greatest length; short ones let more in."""
    longest = trajectory_bytes(PROMPT_TOKENS + 1000)
    buffer = make_buffer(batch_size=2, staleness_bound=9, longest_trajectory_bytes=longest, max_bytes=6 * longest)
    leases = lease_all(buffer)
    assert len(leases) == 6
    deliver(buffer, leases)
    held = 6 * ONE_TOKEN_BYTES
    assert buffer.snapshot().held_bytes == held
    assert len(lease_all(buffer)) == (6 * longest - held) // longest == 5


def test_the_byte_limit_never_stops_a_batch_from_forming() -> None:
    """Room for exactly one batch, and every trajectory of the greatest length."""
    buffer = make_buffer(
        batch_size=4, group_size=2, longest_trajectory_bytes=ONE_TOKEN_BYTES, max_bytes=4 * ONE_TOKEN_BYTES
    )
    for _ in range(3):
        leases = lease_all(buffer)
        assert len(leases) == 4
        for lease in leases:
            deliver(buffer, lease)
            assert buffer.snapshot().held_bytes <= 4 * ONE_TOKEN_BYTES
        train_one(buffer)
    assert buffer.snapshot().held_bytes == 0


def test_retries_pass_the_gate() -> None:
    buffer = make_buffer(
        batch_size=2, staleness_bound=0, longest_trajectory_bytes=ONE_TOKEN_BYTES, max_bytes=2 * ONE_TOKEN_BYTES
    )
    first, second = lease_all(buffer)
    deliver(buffer, first)
    assert buffer.lease("actor-0", 1) == []
    buffer.fail(second.lease_id, Failure(reason=DropReason.FAILED, message="boom"))
    assert [lease.sample_id for lease in buffer.lease("actor-0", 9)] == [second.sample_id]


def test_nothing_is_kept_of_batches_that_checkpoints_cover() -> None:
    """F-19: references are dropped after training."""
    buffer = make_buffer(batch_size=2)
    for _ in range(10):
        deliver(buffer, lease_all(buffer))
        buffer.forget_batches_up_to(train_one(buffer).batch_id)
    status = buffer.snapshot()
    assert (status.batches_kept, status.counts.trained) == (0, 20)
    live = status.live_samples
    assert len(buffer._assembly.samples) == live
    assert len(buffer._store._payloads) == live - status.counts.leased  # type: ignore[attr-defined]


# End of data


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("rows", "sizes"), [(8, [4, 4]), (10, [4, 4, 2]), (3, [3])])
@pytest.mark.parametrize("bound", [0, 2])
def test_every_prompt_is_trained_once_an_epoch_and_the_tail_is_not_lost(
    rows: int, sizes: list[int], epochs: int, bound: int
) -> None:
    """F-23: prompts / batch 8/4, 10/4, 3/4. Epochs follow without a gap: only the very last batch is smaller."""
    buffer = make_buffer(rows=rows, epochs=epochs, batch_size=4, staleness_bound=bound)
    trained: list[Trajectory] = []
    batches = []
    while not buffer.end_of_data:
        deliver(buffer, lease_all(buffer))
        batch = train_one(buffer)
        batches.append((len(batch.trajectories), batch.is_tail, batch.is_last))
        trained += batch.trajectories
    total = rows * epochs
    full, tail = divmod(total, 4)
    expected = [(4, False, False)] * full + [(tail, True, False)] * (tail > 0)
    assert [size for size, _, _ in batches] == [size for size, _, _ in expected]
    assert [is_tail for _, is_tail, _ in batches] == [is_tail for _, is_tail, _ in expected]
    assert [is_last for _, _, is_last in batches] == [False] * (len(batches) - 1) + [True]
    if epochs == 1:
        assert [size for size, _, _ in batches] == sizes
    wanted = [(epoch, f"row-{row}") for epoch in range(epochs) for row in range(rows)]
    assert sorted((t.epoch, t.prompt_id) for t in trained) == sorted(wanted)
    assert buffer.take_batch() is None
    assert buffer.fatal is None


def test_the_tail_waits_for_what_is_still_out() -> None:
    buffer = make_buffer(rows=3, epochs=1, batch_size=4)
    leases = lease_all(buffer)
    deliver(buffer, leases[:2])
    assert buffer.take_batch() is None
    assert not buffer.end_of_data
    buffer.fail(leases[2].lease_id, Failure(reason=DropReason.OVER_LONG, message="too long"))
    batch = buffer.take_batch()
    assert batch is not None
    assert (len(batch.trajectories), batch.is_tail, batch.is_last) == (2, True, True)
    assert not buffer.end_of_data  # it may be brought back
    commit(buffer, batch)
    assert buffer.end_of_data


def test_not_ready_yet_is_not_the_end() -> None:
    buffer = make_buffer(rows=4, epochs=1, batch_size=4)
    assert (buffer.take_batch(), buffer.end_of_data) == (None, False)
    lease_all(buffer)
    assert (buffer.take_batch(), buffer.end_of_data) == (None, False)


def test_the_data_may_end_without_another_batch() -> None:
    buffer = make_buffer(rows=5, epochs=1, batch_size=4)
    leases = lease_all(buffer)
    deliver(buffer, leases[:4])
    batch = train_one(buffer)
    assert not batch.is_last  # one was still out
    buffer.fail(leases[4].lease_id, Failure(reason=DropReason.OVER_LONG, message="too long"))
    assert buffer.end_of_data
    assert buffer.fatal is None


def test_no_data_at_all_is_an_error_at_start() -> None:
    with pytest.raises(DataError, match="no rows"):
        make_buffer(rows=0)


# Runs that cannot go on


def test_a_run_in_which_everything_fails_says_why() -> None:
    """F-17 (d)."""
    buffer = make_buffer(max_attempts=2, max_lost_in_a_row=3, batch_size=8)
    for attempt in range(6):
        assert buffer.fatal is None
        lease = buffer.lease("actor-0", 1)[0]
        message = f"RuntimeError: boom {attempt}"
        buffer.fail(lease.lease_id, Failure(reason=DropReason.FAILED, message=message))
    assert buffer.fatal is not None
    assert "3 prompts in a row" in buffer.fatal
    assert "boom" in buffer.fatal
    assert buffer.lease("actor-0", 1) == []
    assert buffer.missing() == f"nothing: {buffer.fatal}"


def test_one_success_shows_that_not_everything_fails() -> None:
    buffer = make_buffer(max_attempts=1, max_lost_in_a_row=3, batch_size=8)
    for _ in range(5):
        for lease in buffer.lease("actor-0", 2):
            buffer.fail(lease.lease_id, Failure(reason=DropReason.FAILED, message="boom"))
        deliver(buffer, buffer.lease("actor-0", 1))
    assert buffer.fatal is None


def test_data_that_ends_without_one_usable_rollout_is_a_failure() -> None:
    buffer = make_buffer(rows=2, epochs=1)
    deliver(buffer, lease_all(buffer), reward=None)
    assert buffer.end_of_data
    assert buffer.fatal is not None
    assert "without one usable trajectory of 2" in buffer.fatal
    assert "unscorable" in buffer.fatal


# What is seen from outside


def test_status_counts_length_duration_and_staleness_of_every_outcome() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, batch_size=1, staleness_bound=1, on_exceeded="drop")
    slow, fast = lease_all(buffer)
    clock.now = 3.0
    deliver(buffer, fast, [0, 0])
    train_one(buffer)
    medium = buffer.lease("actor-0", 1)[0]
    clock.now = 6.0
    deliver(buffer, medium, [1, 1, 1])
    train_one(buffer)
    clock.now = 9.0
    deliver(buffer, slow, [0] + [2] * 9)  # staleness 2 at version 2
    assert buffer.take_batch() is None
    status = buffer.snapshot()
    assert (status.sampled.count, status.sampled.tokens, status.sampled.seconds) == (3, 15, 3.0 + 3.0 + 9.0)
    assert (status.trained.count, status.trained.tokens, status.trained.max_staleness) == (2, 5, 0)
    stale = status.dropped[DropReason.STALE]
    assert (stale.count, stale.tokens, stale.seconds, stale.max_staleness) == (1, 10, 9.0, 2)
    assert status.trained.by_length == {1: 1, 2: 1}  # up to 2 tokens, up to 4
    assert stale.by_duration == {4: 1}  # up to 16 s
    assert status.length_bias == pytest.approx(2.5 / 5.0)
    assert status.beyond_bound == {slow.prompt.prompt_id: 1}


@pytest.mark.parametrize(
    ("value", "size"), [(0, 0), (0.3, 0), (1, 0), (1.5, 1), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10)]
)
def test_size_classes_are_powers_of_two(value: float, size: int) -> None:
    assert size_class(value) == size


def test_the_log_line_names_what_is_missing() -> None:
    """F-17: waits say which group, which member, which actor, and for how long."""
    clock = FakeClock()
    buffer = make_buffer(rows=2, epochs=1, clock=clock, batch_size=4, group_size=2)
    assert buffer.missing() == "0 of 2 units are ready; 2 more may be leased; no actor is alive"
    whole, waiting = buffer.lease("actor-0", 2), buffer.lease("actor-1", 2)
    deliver(buffer, [*whole, waiting[0]])
    clock.now = 31.25
    prompt = waiting[0].prompt.prompt_id
    assert buffer.missing() == (
        f"1 of 2 units are ready; the oldest missing is group 1 (prompt {prompt}): "
        "sample 3 (member 1) with actor actor-1 for 31.2 s, attempt 0"
    )
    buffer.lose_actor("actor-1")
    assert "sample 3 (member 1) waits for an actor" in buffer.missing()
    deliver(buffer, buffer.lease("actor-0", 1))
    batch = buffer.take_batch()
    assert buffer.missing() == "the learner, to finish batch 0 (2 units)"
    commit(buffer, batch)
    assert buffer.missing() == "nothing: the data ended"


class Archive:
    def __init__(self) -> None:
        self.rows: list[tuple[int, str, int, int]] = []

    def add(self, trajectory: Trajectory, *, outcome: str, batch_id: int, version: int) -> None:
        self.rows.append((trajectory.sample_id, outcome, batch_id, version))


def test_every_trajectory_that_ends_is_archived_with_its_outcome() -> None:
    archive = Archive()
    buffer = make_buffer(batch_size=2, staleness_bound=1, archive=archive)
    a, b, c, d = lease_all(buffer)
    deliver(buffer, a, reward=None)
    deliver(buffer, [b, c])
    batch = train_one(buffer)
    buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(1))
    deliver(buffer, d)
    buffer.note_published(WeightVersion(2))
    buffer.restore(batch.batch_id, WeightVersion(1))
    assert buffer.take_batch() is None  # drops d, which is of version 0, at version 3
    assert archive.rows == [
        (a.sample_id, "dropped_unscorable", -1, 0),
        (b.sample_id, "trained", 0, 0),
        (c.sample_id, "trained", 0, 0),
        (d.sample_id, "dropped_stale", -1, 3),
    ]
