"""Groups in the replay buffer: lost, failed, unscorable and late members."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.replay import ReplayBuffer
from common.types import DropReason, Failure, Lease
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

BROKEN = Failure(reason=DropReason.FAILED, message="ValueError: boom")
LATE = {"group_size": 4, "batch_size": 4, "straggler_after_s": 20.0, "heartbeat_s": 1000.0, "lease_deadline_s": 900.0}


def one_group(**settings: Any) -> tuple[ReplayBuffer, FakeClock, list[Lease]]:
    """A buffer whose first batch is one group of four, leased to one actor."""
    clock = FakeClock()
    buffer = make_buffer(clock=clock, **{**LATE, "staleness_bound": 0, "max_attempts": 3, **settings})
    return buffer, clock, lease_all(buffer)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_unscorable_member_leaves_its_group_to_the_others(reward: float | None) -> None:
    """F-21: rewards [1, None, 0, 1]: the group is the three others, as if it had not existed."""
    buffer, _, leases = one_group()
    for lease, given in zip(leases, [1.0, reward, 0.0, 1.0], strict=True):
        deliver(buffer, lease, reward=given)
    batch = train_one(buffer)
    assert [trajectory.reward for trajectory in batch.trajectories] == [1.0, 0.0, 1.0]
    assert {trajectory.group_id for trajectory in batch.trajectories} == {leases[0].group_id}
    assert dropped(buffer) == {"unscorable": 1}


def test_group_without_a_scorable_member_is_skipped() -> None:
    """F-21. The fourth is not waited for: three are gone, so it could only be alone."""
    buffer, _, leases = one_group()
    receipts = deliver(buffer, leases, reward=None)
    assert [receipt.accepted for receipt in receipts] == [True, True, True, False]
    assert dropped(buffer) == {"unscorable": 3, "incomplete_group": 1}
    assert buffer.snapshot().live_samples == 0
    assert buffer.take_batch() is None


@pytest.mark.parametrize("survivors", [0, 1])
def test_lone_survivor_is_not_trained_as_a_group(survivors: int) -> None:
    """F-17 (c): three members fail for good; there is nothing to compare the fourth with."""
    buffer, _, leases = one_group(max_attempts=1)
    deliver(buffer, leases[:survivors])
    for lease in leases[1:]:
        buffer.fail(lease.lease_id, BROKEN)
    assert dropped(buffer) == {"failed": 3, "incomplete_group": 1}
    assert buffer.snapshot().held_bytes == 0
    assert buffer.heartbeat("actor-0", [leases[0].lease_id]) == [leases[0].lease_id]
    assert buffer.complete(rollout(leases[0])).reason == "late"


def test_two_survivors_are_a_group() -> None:
    buffer, _, leases = one_group(max_attempts=1)
    deliver(buffer, leases[0])
    deliver(buffer, leases[1], reward=None)
    deliver(buffer, leases[2], [])
    deliver(buffer, leases[3])
    assert sample_ids(train_one(buffer)) == [leases[0].sample_id, leases[3].sample_id]


def test_a_group_counts_its_full_size_until_it_leaves() -> None:
    """Two dropped members do not make room for another group."""
    buffer = make_buffer(batch_size=8, group_size=4, staleness_bound=0)
    leases = lease_all(buffer)
    for lease in leases[:2]:
        deliver(buffer, lease, reward=None)
    assert buffer.snapshot().live_samples == 8
    assert buffer.lease("actor-0", 9) == []
    deliver(buffer, leases[2:])
    batch = buffer.take_batch()
    assert (len(sample_ids(batch)), buffer.snapshot().live_samples) == (6, 8)
    commit(buffer, batch)
    assert buffer.snapshot().live_samples == 0


def test_members_of_a_group_are_neighbours_and_groups_are_never_mixed() -> None:
    buffer = make_buffer(batch_size=8, group_size=4, staleness_bound=0)
    leases = lease_all(buffer)
    deliver(buffer, [*leases[::2], *leases[1::2]])
    batch = train_one(buffer)
    assert [trajectory.group_id for trajectory in batch.trajectories] == [0, 0, 0, 0, 1, 1, 1, 1]
    for group_id in (0, 1):
        members = [trajectory for trajectory in batch.trajectories if trajectory.group_id == group_id]
        assert len({trajectory.prompt_id for trajectory in members}) == 1


def test_a_groups_place_is_that_of_its_oldest_member() -> None:
    """Version at issue first: a group with one member of version 0 goes before a whole one of version 1."""
    buffer = make_buffer(batch_size=2, group_size=2, staleness_bound=3)
    early = buffer.lease("slow", 2)
    lost = early[1]
    deliver(buffer, early[0])
    deliver(buffer, buffer.lease("fast", 2))
    train_one(buffer)
    later = buffer.lease("fast", 2)
    deliver(buffer, later)
    buffer.fail(lost.lease_id, BROKEN)
    again = buffer.lease("fast", 1)[0]
    assert (again.sample_id, again.min_weight_version) == (lost.sample_id, 1)
    deliver(buffer, again)
    assert sample_ids(train_one(buffer)) == [early[0].sample_id, lost.sample_id]
    assert sample_ids(train_one(buffer)) == [lease.sample_id for lease in later]


@pytest.mark.parametrize(
    ("rewards", "count"),
    [
        ([0.3, 0.1 + 0.2, 0.3, 0.3], 1),  # F-16: float noise
        ([1.0, 1.0, 1.0, 1.0000001], 1),
        ([0.0, 0.0, 0.0, 0.0], 1),
        ([0.0, 0.0, 0.0, 0.01], 0),
        ([1e6, 1e6, 1e6, 1e6 + 0.5], 1),
        ([1.0, None, None, 1.0], 1),
    ],
)
def test_groups_whose_rewards_say_nothing_are_counted(rewards: list[float | None], count: int) -> None:
    buffer, _, leases = one_group()
    for lease, reward in zip(leases, rewards, strict=True):
        deliver(buffer, lease, reward=reward)
    assert buffer.snapshot().events.uninformative_groups == count
    assert buffer.snapshot().ready_units == 1  # it is the learner's to skip


# Late members


def test_a_late_member_is_tried_again_and_its_first_answer_refused() -> None:
    buffer, clock, leases = one_group(straggler="retry")
    clock.now = 5.0
    deliver(buffer, leases[:3])
    clock.now = 24.0
    buffer.tick()
    assert buffer.ledger().leased == 1
    clock.now = 25.0  # 20 s after the first delivery
    buffer.tick()
    assert buffer.ledger().queued == 1
    again = buffer.lease("actor-1", 1)[0]
    assert (again.sample_id, again.attempt) == (leases[3].sample_id, 1)
    assert buffer.complete(rollout(leases[3])).reason == "late"
    deliver(buffer, again)
    assert len(train_one(buffer).trajectories) == 4
    assert buffer.snapshot().events.straggler_retries == 1


def test_a_retried_member_gets_its_own_time_and_bounded_attempts() -> None:
    buffer, clock, leases = one_group(straggler="retry", max_attempts=2)
    deliver(buffer, leases[:3])
    clock.now = 20.0
    buffer.tick()
    clock.now = 30.0
    buffer.lease("actor-1", 1)
    clock.now = 49.0
    buffer.tick()
    assert buffer.ledger().leased == 1
    clock.now = 50.0
    buffer.tick()
    assert dropped(buffer) == {"failed": 1}
    assert len(train_one(buffer).trajectories) == 3


def test_a_member_that_waits_for_an_actor_is_not_late() -> None:
    buffer, clock, leases = one_group(straggler="retry", max_attempts=1)
    deliver(buffer, leases[:3])
    buffer.lose_actor("actor-0")
    clock.now = 500.0
    buffer.tick()
    assert (buffer.ledger().queued, dropped(buffer)) == (1, {})


def test_a_group_is_closed_at_m_of_g() -> None:
    buffer, clock, leases = one_group(straggler="close", close_at=3)
    deliver(buffer, leases[:2])
    clock.now = 100.0
    buffer.tick()
    assert buffer.ledger().leased == 2  # two are not enough
    deliver(buffer, leases[2])  # the third closes it at once: the time is up already
    assert dropped(buffer) == {"incomplete_group": 1}
    assert buffer.complete(rollout(leases[3])).reason == "late"
    batch = train_one(buffer)
    assert len(batch.trajectories) == 3
    assert buffer.snapshot().events.closed_groups == 1


def test_a_group_with_enough_members_is_closed_when_the_time_is_up() -> None:
    buffer, clock, leases = one_group(straggler="close", close_at=2)
    deliver(buffer, leases[:3])
    buffer.fail(leases[3].lease_id, BROKEN)  # waits for another attempt: closed off all the same
    clock.now = 19.0
    buffer.tick()
    assert buffer.take_batch() is None
    clock.now = 20.0
    assert len(sample_ids(buffer.take_batch())) == 3
    assert dropped(buffer) == {"incomplete_group": 1}


def test_a_converted_group_is_still_one_unit() -> None:
    buffer = make_buffer(
        clock=(clock := FakeClock()), straggler="convert", close_at=2, **{**LATE, "batch_size": 8, "staleness_bound": 0}
    )
    leases = lease_all(buffer)
    deliver(buffer, [*leases[:2], *leases[4:]])
    clock.now = 20.0
    batch = buffer.take_batch()
    assert batch is not None
    assert len(batch.trajectories) == 6
    assert buffer.snapshot().live_samples == 8
    assert buffer.snapshot().events.converted_groups == 1
    assert dropped(buffer) == {"incomplete_group": 2}


def test_a_group_that_is_whole_in_time_is_neither_closed_nor_converted() -> None:
    buffer, clock, leases = one_group(straggler="convert", close_at=2)
    deliver(buffer, leases)
    clock.now = 100.0
    batch = buffer.take_batch()
    assert batch is not None
    assert len(batch.trajectories) == 4
    events = buffer.snapshot().events
    assert (events.closed_groups, events.converted_groups) == (0, 0)


# F-17 as a whole: eight groups of four


@pytest.mark.parametrize("trouble", ["never returns", "raises", "three raise"])
@pytest.mark.parametrize(("bound", "on_exceeded"), [(0, "mask"), (1, "mask"), (1, "wait")])
def test_one_bad_member_stops_nothing_and_pollutes_nothing(trouble: str, bound: int, on_exceeded: str) -> None:
    """F-17: member 2 of group 3; the run ends, names group 3, and trains only what was generated, each group once."""
    clock = FakeClock()
    buffer = make_buffer(
        rows=8,
        epochs=1,
        clock=clock,
        batch_size=8,
        group_size=4,
        staleness_bound=bound,
        on_exceeded=on_exceeded,
        lease_deadline_s=30.0,
        heartbeat_s=10.0,
        max_attempts=2,
        straggler_after_s=1000.0,
    )
    bad_members = {"never returns": [2], "raises": [2], "three raise": [1, 2, 3]}[trouble]
    bad = {4 * 3 + member for member in bad_members}
    generated, trained, named = set(), [], False
    hanging: list[Lease] = []
    for _ in range(200):
        clock.now += 5.0
        buffer.heartbeat("actor-0", [lease.lease_id for lease in hanging])
        for lease in buffer.lease("actor-0", 16):
            if lease.sample_id not in bad:
                deliver(buffer, lease)
                generated.add(lease.sample_id)
            elif trouble == "never returns":
                hanging.append(lease)
            else:
                buffer.fail(lease.lease_id, BROKEN)
        named |= "group 3 " in buffer.missing() and "member 2" in buffer.missing()
        if buffer.take_batch():
            trained += sample_ids(train_one(buffer))
        if buffer.end_of_data:
            break
    assert buffer.end_of_data
    assert len(set(trained)) == len(trained)
    assert set(trained) <= generated
    lost = {"failed": len(bad)}
    group_three = {12, 13, 14, 15} - bad
    if trouble == "three raise":
        lost["incomplete_group"] = len(group_three)
        group_three = set()
    elif trouble == "never returns" and (bound, on_exceeded) == (1, "mask"):
        lost["stale"] = len(group_three)  # while it was waited for, the others were trained
        group_three = set()
    assert set(trained) == set(range(12)) | group_three | set(range(16, 32))
    assert dropped(buffer) == lost
    assert buffer.snapshot().failed_prompts
    if trouble == "never returns":
        assert named
