"""Leases: shares, deadlines, heartbeats, lost actors, bounded retries, late and repeated deliveries."""

from __future__ import annotations

import pytest

from buffer.leases import Timers
from common.errors import ConfigError, WireError
from common.types import DropReason, Failure, LeaseId
from tests.buffer_kit import (
    FakeClock,
    deliver,
    dropped,
    lease_all,
    make_buffer,
    make_settings,
    rollout,
    sample_ids,
    train_one,
)

BROKEN = Failure(reason=DropReason.FAILED, message="generation raised ValueError: boom")
UNHARMED = Failure(reason=DropReason.FAILED, message="canary failed", uses_attempt=False)


def test_a_lease_names_all_that_its_actor_needs() -> None:
    buffer = make_buffer(batch_size=4, group_size=2, lease_deadline_s=60.0)
    first, second = buffer.lease("actor-0", 2)
    assert (first.group_id, first.group_size, first.attempt, first.time_left_s) == (0, 2, 0, 60.0)
    assert (first.sample_id, second.sample_id, first.lease_id, second.lease_id) == (0, 1, 0, 1)
    assert first.prompt == second.prompt
    assert first.seed != second.seed


def test_leases_stop_at_the_admission_limit_and_go_on_when_a_batch_is_trained() -> None:
    buffer = make_buffer(batch_size=4, staleness_bound=2)
    leases = lease_all(buffer)
    assert len(leases) == 12
    deliver(buffer, leases)
    batch = buffer.take_batch()
    assert buffer.lease("actor-0", 99) == []  # in training counts
    train_one(buffer)
    assert len(lease_all(buffer)) == 4
    assert batch is not None


@pytest.mark.parametrize(
    ("group_size", "actors", "slots", "expected"),
    [
        (1, 3, 99, 7),  # ceil(20 / 3)
        (1, 3, 5, 5),  # not more than it asked for
        (1, 1, 99, 20),
        (4, 3, 99, 8),  # 7, rounded up to whole groups
        (4, 20, 99, 4),
        (4, 1, 6, 6),  # one group and half of the next: slots are not left idle
    ],
)
def test_one_poll_takes_its_share_of_what_is_open(group_size: int, actors: int, slots: int, expected: int) -> None:
    buffer = make_buffer(batch_size=20, group_size=group_size, staleness_bound=0)
    for actor in range(1, actors):
        buffer.lease(f"actor-{actor}", 0)
    assert len(buffer.lease("actor-0", slots)) == expected


def test_a_group_goes_to_one_actor_that_has_the_slots_else_it_is_split() -> None:
    buffer = make_buffer(batch_size=8, group_size=4)
    assert {lease.group_id for lease in buffer.lease("wide", 4)} == {0}
    assert [lease.group_id for lease in buffer.lease("narrow", 3)] == [1, 1, 1]
    assert [lease.group_id for lease in buffer.lease("wide", 5)] == [1, 2, 2, 2, 2]  # the rest of the split group first


def test_seeds_depend_on_sample_and_attempt_not_on_the_actor() -> None:
    """F-31."""
    one, other = (make_buffer(batch_size=4, staleness_bound=0) for _ in range(2))
    by_one = {lease.sample_id: lease.seed for actor in "abc" for lease in one.lease(actor, 2)}
    by_other = {lease.sample_id: lease.seed for lease in reversed(other.lease("c", 4))}
    assert by_one == by_other
    assert len(set(by_one.values())) == 4


def test_a_failed_attempt_is_tried_again_with_another_seed_ahead_of_new_prompts() -> None:
    buffer = make_buffer(batch_size=4)
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.fail(lease.lease_id, BROKEN).accepted
    again = buffer.lease("actor-1", 1)[0]
    assert (again.sample_id, again.attempt, again.prompt) == (lease.sample_id, 1, lease.prompt)
    assert again.seed != lease.seed
    assert again.lease_id != lease.lease_id


def test_attempts_are_bounded_and_the_prompt_is_named() -> None:
    buffer = make_buffer(max_attempts=2)
    for _ in range(2):
        lease = buffer.lease("actor-0", 1)[0]
        buffer.fail(lease.lease_id, BROKEN)
    assert dropped(buffer) == {"failed": 1}
    status = buffer.snapshot()
    assert status.failed_prompts == (lease.prompt.prompt_id,)
    assert (status.events.failed_attempts, status.events.retries) == (2, 1)
    assert buffer.lease("actor-0", 1)[0].sample_id != lease.sample_id


def test_failures_of_the_actor_use_up_no_attempt() -> None:
    buffer = make_buffer(max_attempts=1)
    for _ in range(5):
        lease = buffer.lease("actor-0", 1)[0]
        buffer.fail(lease.lease_id, UNHARMED)
        assert (lease.sample_id, lease.attempt) == (0, 0)
    lease = buffer.lease("actor-0", 1)[0]
    buffer.lose_actor("actor-0")
    again = buffer.lease("actor-1", 1)[0]
    assert (again.sample_id, again.attempt, again.seed) == (0, 0, lease.seed)
    assert dropped(buffer) == {}


@pytest.mark.parametrize("reason", [DropReason.OVER_LONG, DropReason.UNSCORABLE, DropReason.EMPTY])
def test_other_failures_are_final(reason: DropReason) -> None:
    buffer = make_buffer(max_attempts=3)
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.fail(lease.lease_id, Failure(reason=reason, message="500 tokens, limit 32")).accepted
    assert dropped(buffer) == {reason.value: 1}


@pytest.mark.parametrize("reason", [DropReason.STALE, DropReason.NO_UPDATE, DropReason.INCOMPLETE_GROUP])
def test_an_actor_cannot_drop_for_the_reasons_of_others(reason: DropReason) -> None:
    buffer = make_buffer()
    lease = buffer.lease("actor-0", 1)[0]
    with pytest.raises(ValueError, match=reason.value):
        buffer.fail(lease.lease_id, Failure(reason=reason, message=""))


def test_a_silent_actor_loses_its_leases_after_the_heartbeat_limit() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, heartbeat_s=10.0)
    leases = buffer.lease("actor-0", 3)
    clock.now = 9.9
    buffer.tick()
    assert (buffer.ledger().leased, buffer.snapshot().oldest_lease_s) == (3, 9.9)
    clock.now = 10.0
    buffer.tick()
    status = buffer.snapshot()
    assert (status.counts.leased, status.counts.queued) == (0, 3)
    assert (status.num_actors, status.events.lost_actors, status.events.lost_leases) == (0, 1, 3)
    assert status.events.failed_attempts == 0
    assert [lease.sample_id for lease in buffer.lease("actor-1", 3)] == [lease.sample_id for lease in leases]


def test_heartbeats_keep_leases_until_the_deadline() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, heartbeat_s=10.0, lease_deadline_s=60.0)
    lease = buffer.lease("actor-0", 1)[0]
    for now in range(5, 60, 5):
        clock.now = now
        assert buffer.heartbeat("actor-0", [lease.lease_id]) == []
    clock.now = 60.0
    assert buffer.heartbeat("actor-0", [lease.lease_id]) == [lease.lease_id]
    status = buffer.snapshot()
    assert (status.events.expired_leases, status.events.failed_attempts, status.events.lost_actors) == (1, 1, 0)
    assert buffer.lease("actor-0", 1)[0].attempt == 1


def test_a_lease_its_actor_never_heard_of_goes_back_without_an_attempt() -> None:
    """The answer of a poll may be lost: the actor lives, and does not name the lease in its heartbeats."""
    clock = FakeClock()
    buffer = make_buffer(clock=clock, heartbeat_s=10.0)
    unheard, known = buffer.lease("actor-0", 1)[0], buffer.lease("actor-0", 1)[0]
    for now in (5.0, 10.0):
        clock.now = now
        buffer.heartbeat("actor-0", [known.lease_id])
    assert (buffer.ledger().queued, buffer.ledger().leased) == (1, 1)
    again = buffer.lease("actor-0", 1)[0]
    assert (again.sample_id, again.attempt) == (unheard.sample_id, 0)
    assert buffer.snapshot().events.lost_actors == 0


def test_an_actor_may_not_renew_the_lease_of_another() -> None:
    buffer = make_buffer()
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.heartbeat("actor-1", [lease.lease_id, LeaseId(99)]) == [lease.lease_id, 99]
    assert buffer.ledger().leased == 1


def test_an_actor_that_comes_back_finds_its_leases_void_and_gets_new_ones() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, heartbeat_s=10.0)
    lease = buffer.lease("actor-0", 1)[0]
    clock.now = 30.0
    assert buffer.heartbeat("actor-0", [lease.lease_id]) == [lease.lease_id]
    assert buffer.complete(rollout(lease)).reason == "late"
    assert buffer.lease("actor-0", 1)[0].sample_id == lease.sample_id


def test_an_actor_that_was_reported_dead_gets_nothing_ever_again() -> None:
    """Its last poll may still be waiting when its death is noticed, and would take what just came back."""
    buffer = make_buffer()
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.lose_actor("actor-0") == 1
    assert buffer.lease("actor-0", 1) == []
    assert buffer.heartbeat("actor-0", [lease.lease_id]) == [lease.lease_id]
    assert buffer.complete(rollout(lease)).reason == "late"
    assert (buffer.snapshot().num_actors, buffer.ledger().queued) == (0, 1)
    assert buffer.lose_actor("actor-0") == 0
    again = buffer.lease("actor-0.1", 1)[0]
    assert again.sample_id == lease.sample_id
    assert buffer.snapshot().num_actors == 1


def test_an_actor_that_is_reported_dead_after_it_fell_silent_does_not_come_back() -> None:
    clock = FakeClock()
    buffer = make_buffer(clock=clock, heartbeat_s=10.0)
    buffer.lease("actor-0", 1)
    clock.now = 10.0
    buffer.tick()
    assert buffer.lose_actor("actor-0") == 0  # they went back when it fell silent
    assert buffer.lease("actor-0", 1) == []
    assert buffer.snapshot().events.lost_actors == 1


def test_losing_an_unknown_actor_changes_nothing() -> None:
    buffer = make_buffer()
    assert buffer.lose_actor("nobody") == 0
    assert buffer.snapshot().events.lost_actors == 0


def test_late_result_after_a_redispatch_is_refused_and_counted() -> None:
    """F-18: limit 1 s, the first attempt answers after 2 s, the second after 0.2 s; group of four, trained once."""
    clock = FakeClock()
    buffer = make_buffer(
        clock=clock, batch_size=4, group_size=4, staleness_bound=0, lease_deadline_s=1.0, heartbeat_s=5.0
    )
    slow, *others = buffer.lease("actor-0", 4)
    deliver(buffer, others)
    clock.now = 1.0
    second = buffer.lease("actor-1", 1)[0]
    assert second.sample_id == slow.sample_id
    clock.now = 1.2
    assert buffer.complete(rollout(second)).accepted
    clock.now = 2.0
    assert buffer.complete(rollout(slow)).reason == "late"
    assert buffer.complete(rollout(second)).reason == "duplicate"  # its acknowledgement was lost
    batch = train_one(buffer)
    assert sorted(sample_ids(batch)) == [0, 1, 2, 3]
    assert buffer.complete(rollout(slow)).reason == "late"
    assert buffer.complete(rollout(second)).reason == "duplicate"
    events = buffer.snapshot().events
    assert (events.late_deliveries, events.duplicate_deliveries) == (2, 2)
    assert buffer.ledger().trained == buffer.ledger().issued == 4


def test_a_late_result_before_the_redispatch_is_refused_too() -> None:
    """Once void, always void: the sample waits for its next attempt, whose seed differs."""
    clock = FakeClock()
    buffer = make_buffer(clock=clock, lease_deadline_s=1.0)
    lease = buffer.lease("actor-0", 1)[0]
    clock.now = 1.0
    assert buffer.complete(rollout(lease)).reason == "late"
    assert buffer.ledger().queued == 1


def test_failing_twice_uses_one_attempt() -> None:
    buffer = make_buffer(max_attempts=3)
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.fail(lease.lease_id, BROKEN).accepted
    assert buffer.fail(lease.lease_id, BROKEN).reason == "late"
    assert buffer.lease("actor-0", 1)[0].attempt == 1


@pytest.mark.parametrize("lease_id", [-1, 1, 99])
def test_a_lease_that_was_never_issued_is_refused(lease_id: int) -> None:
    buffer = make_buffer()
    lease = buffer.lease("actor-0", 1)[0]
    assert buffer.fail(LeaseId(lease_id), BROKEN).reason == "unknown lease"
    assert buffer.snapshot().events.unknown_deliveries == 1
    assert buffer.complete(rollout(lease)).accepted


def test_a_delivery_that_contradicts_its_lease_is_an_error_and_changes_nothing() -> None:
    buffer = make_buffer(batch_size=2)
    mine, other = buffer.lease("actor-0", 2)
    mixed_up = rollout(other)
    object.__setattr__(mixed_up, "lease_id", mine.lease_id)
    with pytest.raises(WireError, match=f"lease {mine.lease_id}"):
        buffer.complete(mixed_up)
    assert buffer.ledger().leased == 2
    assert all(receipt.accepted for receipt in deliver(buffer, [mine, other]))


def test_a_rollout_older_than_its_lease_allows_is_refused_as_a_failed_attempt() -> None:
    """Its staleness would be beyond what the lease vouches for."""
    buffer = make_buffer(batch_size=1)
    deliver(buffer, buffer.lease("actor-0", 1))
    train_one(buffer)
    lease = buffer.lease("actor-0", 1)[0]
    assert lease.min_weight_version == 1
    receipt = buffer.complete(rollout(lease, [0, 1]))
    assert (receipt.accepted, receipt.reason) == (False, "older than the lease allows")
    assert buffer.lease("actor-0", 1)[0].attempt == 1


def test_timers_look_again_when_a_due_time_moved_and_forget_what_is_gone() -> None:
    timers: Timers[str] = Timers()
    due = {"a": 5.0, "b": 1.0}
    timers.push(1.0, "a")
    timers.push(1.0, "b")
    timers.push(1.0, "gone")
    assert list(timers.pop_due(2.0, due.get)) == ["b"]
    assert list(timers.pop_due(4.9, due.get)) == []
    assert list(timers.pop_due(5.0, due.get)) == ["a"]
    assert list(timers.pop_due(99.0, due.get)) == []


def test_a_byte_limit_that_cannot_hold_one_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.max_mib"):
        make_settings(batch_size=8, longest_trajectory_bytes=100, max_bytes=799)


def test_a_byte_limit_of_exactly_one_batch_is_enough() -> None:
    assert make_settings(batch_size=8, longest_trajectory_bytes=100, max_bytes=800).max_bytes == 800
