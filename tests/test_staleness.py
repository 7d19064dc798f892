"""The rules of flow control: admission, eligibility by mode, and `wait` against brute force."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from buffer import staleness
from buffer.replay import ReplayBuffer
from common.types import BatchId, BatchOutcome, DropReason, Failure, Lease, WeightVersion
from tests.buffer_kit import (
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


@pytest.mark.parametrize(
    ("live", "bound", "batch_size", "unit_size", "units"),
    [
        (0, 0, 4, 1, 4),  # (0 + 1) * 4
        (0, 2, 4, 1, 12),  # F-25: bound 2, batch 4
        (11, 2, 4, 1, 1),
        (12, 2, 4, 1, 0),
        (8, 1, 8, 8, 1),
        (9, 1, 8, 8, 0),  # 9 + 8 > 16
        (40, 1, 8, 8, 0),  # a restore brought back more than the limit
    ],
)
def test_admission_limit(live: int, bound: int, batch_size: int, unit_size: int, units: int) -> None:
    assert staleness.admissible(live, bound=bound, batch_size=batch_size, unit_size=unit_size) == units


@pytest.mark.parametrize(
    ("live", "reserved", "units"),
    [
        (0, 0, 10),  # 1000 / 100
        (6, 940, 0),  # 60 left do not hold 100
        (6, 900, 1),
        (3, 5000, 1),  # the units do not make up a batch of 4: never shut
        (4, 5000, 0),
    ],
)
def test_byte_limit_counts_what_may_come_but_never_stops_a_batch(live: int, reserved: int, units: int) -> None:
    fitting = staleness.fitting(live, reserved, unit_size=1, batch_size=4, max_bytes=1000, longest_bytes=100)
    assert fitting == units


@pytest.mark.parametrize(
    ("mode", "bound", "last"),
    [
        ("drop", 4, 7),  # oldest token 3
        ("drop", 0, 3),
        ("mask", 4, 10),  # newest token 6
        ("wait", 4, None),
    ],
)
def test_last_version_at_which_a_unit_may_be_trained(mode: staleness.OnExceeded, bound: int, last: int | None) -> None:
    assert staleness.last_version([(3, 5), (4, 6)], bound=bound, mode=mode) == last


def test_mask_acts_as_drop_at_bound_zero() -> None:
    assert staleness.effective_mode("mask", 0) == "drop"
    assert staleness.effective_mode("mask", 1) == "mask"
    assert staleness.effective_mode("wait", 0) == "wait"


# `wait` as a pure rule


@pytest.mark.parametrize(
    ("outside", "allowed"),
    [
        # c = 5, η = 2, B = 2: versions 3, 4, 5 fall due at 5, 6, 7
        ({}, True),
        ({3: 1}, False),  # must be trained now
        ({4: 2}, True),
        ({4: 3}, False),  # three at version 6, room for two
        ({4: 2, 5: 2}, True),
        ({4: 1, 5: 4}, False),  # five until version 7, room for four
        ({5: 5}, False),
    ],
)
def test_wait_forms_a_batch_only_if_the_rest_can_still_be_trained_in_time(
    outside: dict[int, int], allowed: bool
) -> None:
    assert staleness.may_form(outside, version=5, bound=2, batch_size=2) is allowed


def schedulable(deadlines: list[int], version: int, batch_size: int) -> bool:
    """Brute force: some assignment of samples to the batches at version + 1, version + 2, … meets every deadline."""
    if not deadlines:
        return True
    for chosen in itertools.combinations(range(len(deadlines)), min(batch_size, len(deadlines))):
        rest = [deadline for index, deadline in enumerate(deadlines) if index not in chosen]
        if all(deadlines[index] > version for index in chosen) and schedulable(rest, version + 1, batch_size):
            return True
    return False


def multisets(versions: range, most: int) -> Iterator[Counter[int]]:
    for size in range(most + 1):
        for chosen in itertools.combinations_with_replacement(versions, size):
            yield Counter(chosen)


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_wait_is_as_strict_as_it_must_be_and_no_stricter(bound: int, batch_size: int) -> None:
    """`may_form` says yes exactly when what is left outside can be trained in time by the batches that follow."""
    version = 3
    answers = Counter[bool]()
    for outside in multisets(range(version - bound, version + 1), 6):
        allowed = staleness.may_form(outside, version=version, bound=bound, batch_size=batch_size)
        deadlines = [issued_at + bound for issued_at in outside.elements()]
        assert allowed == schedulable(deadlines, version, batch_size), outside
        answers[allowed] += 1
    assert answers[True]
    assert answers[False]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_excess_is_zero_exactly_when_some_batch_may_be_formed(bound: int, batch_size: int) -> None:
    """Brute force over every choice of a batch, with every lease delivered."""
    version = 3
    for live in multisets(range(version - bound - 1, version + 1), 6):
        samples = sorted(live.elements())
        possible = any(
            all(issued_at + bound >= version for issued_at in (samples[index] for index in chosen))
            and staleness.may_form(
                live - Counter(samples[index] for index in chosen), version=version, bound=bound, batch_size=batch_size
            )
            for chosen in itertools.combinations(range(len(samples)), min(batch_size, len(samples)))
        )
        excess = staleness.excess(live, version=version, bound=bound, batch_size=batch_size)
        assert (excess <= 0) == possible, live


# `wait` as a model of the whole buffer: every order of events of a small case


@pytest.mark.parametrize(("bound", "batch_size"), [(0, 2), (1, 1), (1, 2), (2, 1)])
def test_wait_holds_the_bound_and_never_blocks_in_any_order_of_deliveries(bound: int, batch_size: int) -> None:
    """All sequences of "the i-th oldest outstanding lease is delivered": the gate is kept full, batches train at once.

    The sample that is held back longest must be the one that is waited for, never the one that is trained too late.
    """
    depth = 6
    for script in itertools.product(range(min(3, (bound + 1) * batch_size)), repeat=depth):
        buffer = make_buffer(rows=50, batch_size=batch_size, staleness_bound=bound, on_exceeded="wait")
        outstanding = lease_all(buffer)
        for turn in [*script, *([0] * (bound + 1) * batch_size)]:  # in the end the oldest are delivered
            if outstanding:
                deliver(buffer, outstanding.pop(min(turn, len(outstanding) - 1)))
            outstanding = check_trained(buffer, outstanding, bound)
        assert buffer.snapshot().version > 0
        assert dropped(buffer) == {}


def check_trained(buffer: ReplayBuffer, outstanding: list[Lease], bound: int) -> list[Lease]:
    while batch := buffer.take_batch():
        assert max(trajectory.staleness(batch.version) for trajectory in batch.trajectories) <= bound
        commit(buffer, batch)
    return outstanding + lease_all(buffer)


# The modes in the buffer


def jump(buffer: ReplayBuffer) -> int:
    """A learner that dies after a publication: the next label is two higher, and nothing was trained."""
    buffer.note_published(WeightVersion(buffer.snapshot().highest_version + 1))
    return buffer.restore(None, WeightVersion(0))


def test_mask_keeps_a_unit_with_a_fresh_token_and_drops_one_without() -> None:
    buffer = make_buffer(batch_size=1, staleness_bound=1, on_exceeded="mask")
    old, mixed = (buffer.lease("slow", 1)[0] for _ in range(2))
    now = jump(buffer)
    deliver(buffer, old, [0, 0])
    deliver(buffer, mixed, [0, now])
    batch = train_one(buffer)
    assert sample_ids(batch) == [mixed.sample_id]
    assert dropped(buffer) == {"stale": 1}


def test_drop_refuses_a_single_stale_token() -> None:
    buffer = make_buffer(batch_size=1, staleness_bound=1, on_exceeded="drop")
    stale, fresh = (buffer.lease("slow", 1)[0] for _ in range(2))
    assert jump(buffer) == 2
    deliver(buffer, stale, [0, 2])
    deliver(buffer, fresh, [1, 2])
    assert sample_ids(train_one(buffer)) == [fresh.sample_id]
    assert dropped(buffer) == {"stale": 1}


def test_a_stale_member_drops_its_whole_group_even_before_it_is_whole() -> None:
    buffer = make_buffer(batch_size=2, group_size=2, staleness_bound=1, on_exceeded="drop")
    first, second = buffer.lease("slow", 2)
    deliver(buffer, first, 0)
    assert jump(buffer) == 2
    assert buffer.take_batch() is None
    assert dropped(buffer) == {"stale": 2}
    assert buffer.heartbeat("slow", [second.lease_id]) == [second.lease_id]  # so that its generation is given up
    assert buffer.complete(rollout(second, 2)).reason == "late"


def test_stale_members_stay_in_their_group_under_mask() -> None:
    """Their rewards belong to the baseline; the learner masks their tokens."""
    buffer = make_buffer(batch_size=2, group_size=2, staleness_bound=1, on_exceeded="mask")
    leases = buffer.lease("slow", 2)
    jump(buffer)
    deliver(buffer, leases[0], 0)
    deliver(buffer, leases[1], 2)
    assert sample_ids(train_one(buffer)) == [leases[0].sample_id, leases[1].sample_id]
    assert dropped(buffer) == {}


def test_what_is_stale_is_dropped_even_if_no_batch_forms() -> None:
    """Otherwise stale samples would fill the buffer and keep the gate shut for good."""
    buffer = make_buffer(batch_size=2, staleness_bound=0)
    leases = lease_all(buffer)
    deliver(buffer, leases[0])
    jump(buffer)
    assert buffer.lease("actor-0", 9) == []
    assert buffer.take_batch() is None
    assert dropped(buffer) == {"stale": 1}
    assert len(buffer.lease("actor-0", 9)) == 1


@pytest.mark.parametrize("mode", ["mask", "drop", "wait"])
def test_bound_zero_leases_nothing_while_a_batch_is_in_training(mode: str) -> None:
    """Retries neither: what they sample would be stale by the time the batch is finished.

    A restore brings one sample more than the limit back, so that one waits for a lease while another is trained.
    """
    buffer = make_buffer(batch_size=1, staleness_bound=0, on_exceeded=mode)
    back = buffer.lease("actor-0", 1)[0]
    deliver(buffer, back)
    batch = buffer.take_batch()
    assert batch is not None
    buffer.finish(batch.batch_id, BatchOutcome.VALUE_WARMUP, WeightVersion(0))
    lost = buffer.lease("actor-0", 1)[0]
    buffer.fail(lost.lease_id, Failure(reason=DropReason.FAILED, message="boom"))
    assert buffer.restore(None, WeightVersion(0)) == 0
    batch = buffer.take_batch()
    assert sample_ids(batch) == [back.sample_id]
    assert (buffer.ledger().queued, buffer.lease("actor-0", 1)) == (1, [])
    commit(buffer, batch)
    again = buffer.lease("actor-0", 1)[0]
    assert (again.sample_id, again.min_weight_version) == (lost.sample_id, 1)
    deliver(buffer, again)
    assert sample_ids(train_one(buffer)) == [lost.sample_id]
    assert dropped(buffer) == {}


@pytest.mark.parametrize("mode", ["mask", "drop", "wait"])
def test_bound_zero_trains_one_version_a_batch_and_drops_nothing(mode: str) -> None:
    """F-07: the asynchronous buffer with bound 0 hands out what a synchronous loop would."""
    buffer = make_buffer(rows=16, epochs=1, batch_size=4, staleness_bound=0, on_exceeded=mode)
    prompts = []
    for version in range(4):
        deliver(buffer, lease_all(buffer))
        batch = train_one(buffer)
        assert {int(v) for t in batch.trajectories for v in t.weight_versions[t.loss_mask]} == {version}
        prompts += [trajectory.prompt_id for trajectory in batch.trajectories]
    source = make_buffer(rows=16, epochs=1)._prompts
    assert prompts == [prompt.prompt_id for prompt in iter(source.next, None)]
    assert dropped(buffer) == {}


def test_wait_holds_the_batch_back_for_the_sample_that_would_become_too_stale() -> None:
    buffer = make_buffer(batch_size=1, staleness_bound=1, on_exceeded="wait")
    slow = buffer.lease("slow", 1)[0]
    fast = buffer.lease("fast", 1)[0]
    deliver(buffer, fast)
    assert train_one(buffer).version == 0  # at version 1 the slow one is still in time
    deliver(buffer, lease_all(buffer, "fast"))
    assert buffer.snapshot().ready_units == 1
    assert buffer.take_batch() is None  # at version 2 it would not be
    deliver(buffer, slow, [0, 1])
    batch = train_one(buffer)
    assert sample_ids(batch) == [slow.sample_id]
    assert batch.trajectories[0].staleness(batch.version) == 1


def test_wait_lets_go_of_a_sample_whose_lease_was_lost() -> None:
    """Its next lease is of the newest version, so it can wait while others are trained."""
    clock = FakeClock()
    buffer = make_buffer(clock=clock, batch_size=1, staleness_bound=1, on_exceeded="wait")
    slow = buffer.lease("slow", 1)[0]
    deliver(buffer, buffer.lease("fast", 1))
    train_one(buffer)
    deliver(buffer, buffer.lease("fast", 1))
    assert buffer.take_batch() is None
    assert buffer.lose_actor("slow") == 1
    assert buffer.take_batch() is not None
    commit(buffer, buffer.take_batch())
    again = buffer.lease("fast", 1)[0]
    assert (again.sample_id, again.min_weight_version) == (slow.sample_id, 2)


def test_wait_drops_the_oldest_when_a_restore_brings_back_too_much() -> None:
    buffer = make_buffer(batch_size=2, staleness_bound=1, on_exceeded="wait")
    for _ in range(2):
        deliver(buffer, lease_all(buffer))
        train_one(buffer)
    deliver(buffer, lease_all(buffer))
    assert buffer.snapshot().live_samples == 4  # trained: 0 1 at version 0, 2 3 at version 1
    assert buffer.restore(BatchId(0), WeightVersion(1)) == 3
    assert buffer.snapshot().live_samples == 6
    # At version 3 with η = 1 whatever was issued before version 2 may not be trained any more.
    issued_before_2 = {2, 3, 4, 5}
    batch = train_one(buffer)
    assert set(sample_ids(batch)).isdisjoint(issued_before_2)
    assert batch.version == 3
    assert all(trajectory.staleness(3) <= 1 for trajectory in batch.trajectories)
    assert dropped(buffer) == {"stale": 4}


def test_oldest_version_goes_first_then_the_lowest_lease() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, batch_size=2, staleness_bound=4)
    held = buffer.lease("slow", 2)  # version 0
    deliver(buffer, buffer.lease("fast", 2))
    train_one(buffer)
    fresh = buffer.lease("fast", 2)  # version 1
    deliver(buffer, fresh)
    deliver(buffer, held[::-1])
    assert sample_ids(buffer.take_batch()) == [held[0].sample_id, held[1].sample_id]


def test_a_retried_sample_takes_its_place_by_its_current_lease() -> None:
    buffer = make_buffer(batch_size=2, staleness_bound=4)
    lost = buffer.lease("slow", 1)[0]
    others = buffer.lease("fast", 3)
    buffer.lose_actor("slow")
    again = next(lease for lease in buffer.lease("fast", 1))
    assert again.sample_id == lost.sample_id
    deliver(buffer, [again, *others])
    assert sample_ids(buffer.take_batch()) == [others[0].sample_id, others[1].sample_id]
