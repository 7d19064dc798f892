"""Producers, a learner and a buffer over time: backlog, slow prompts, length bias. A fake clock, scripted actors."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from buffer.replay import ReplayBuffer
from buffer.store import trajectory_bytes
from common.types import Lease, Trajectory
from tests.buffer_kit import PROMPT_TOKENS, FakeClock, commit, dropped, make_buffer, rollout


@dataclass
class World:
    """One actor with slots, one learner that takes a batch every `learner_s`; events in the order of time."""

    buffer: ReplayBuffer
    clock: FakeClock
    slots: int
    duration_s: Callable[[Lease], float]
    learner_s: float
    running: list[tuple[float, int, Lease, list[int]]] = field(default_factory=list)
    trained: list[Trajectory] = field(default_factory=list)
    largest_backlog: int = 0

    def run(self, num_batches: int, *, limit_s: float) -> None:
        """Until so many batches are trained. Rollouts sample one token at the start and one after each new version."""
        next_take = self.clock.now + self.learner_s
        done = 0
        while done < num_batches:
            self.poll()
            next_delivery = self.running[0][0] if self.running else float("inf")
            self.clock.now = min(next_take, next_delivery)
            assert self.clock.now < limit_s, self.buffer.missing()
            self.buffer.heartbeat("actor-0", [lease.lease_id for _, _, lease, _ in self.running])
            if next_delivery <= next_take:
                _, _, lease, versions = heapq.heappop(self.running)
                self.buffer.complete(rollout(lease, versions))
            else:
                next_take += self.learner_s
                done += self.learn()
            ledger = self.buffer.ledger()
            self.largest_backlog = max(self.largest_backlog, ledger.assembling + ledger.ready + ledger.in_training)
            assert ledger.balanced

    def poll(self) -> None:
        for lease in self.buffer.lease("actor-0", self.slots - len(self.running)):
            item = (self.clock.now + self.duration_s(lease), lease.lease_id, lease, [lease.min_weight_version])
            heapq.heappush(self.running, item)

    def learn(self) -> bool:
        batch = self.buffer.take_batch()
        if batch is None:
            return False
        version = commit(self.buffer, batch)
        self.buffer.forget_batches_up_to(batch.batch_id)
        for _, _, _, versions in self.running:
            versions.append(version)
        self.trained += batch.trajectories
        return True


def test_backlog_is_bounded_and_producers_are_held_back() -> None:
    """F-19: 100 rollouts/s made, 5/s taken (a batch of 5 each second), limit (1 + 1) * 5, for 30 s."""
    clock = FakeClock()
    longest = trajectory_bytes(PROMPT_TOKENS + 20)
    buffer = make_buffer(
        clock=clock, batch_size=5, staleness_bound=1, longest_trajectory_bytes=longest, max_bytes=100 * longest
    )
    world = World(buffer, clock, slots=100, duration_s=lambda lease: 0.5, learner_s=1.0)
    world.run(30, limit_s=40.0)
    status = buffer.snapshot()
    assert world.largest_backlog <= 10
    assert status.counts.issued <= 30 * 5 + 10  # nothing is made only to be thrown away
    assert dropped(buffer) == {}
    assert status.trained.max_staleness <= 1
    assert len(world.trained) == status.counts.trained == 150
    assert len(buffer._assembly.samples) <= 10


def slow_prompts(lease: Lease) -> float:
    """5 of 20 prompts need four learner steps, the others less than one."""
    return 4.5 if int(lease.prompt.prompt_id.removeprefix("row-")) < 5 else 0.5


SLOW = {f"row-{row}" for row in range(5)}


@pytest.mark.parametrize("on_exceeded", ["mask", "drop", "wait"])
def test_slow_prompts_are_trained_or_named(on_exceeded: str) -> None:
    """F-20: 20 prompts, 5 of them need four learner steps, bound 2, 60 steps."""
    clock = FakeClock()
    buffer = make_buffer(
        rows=20, clock=clock, batch_size=4, staleness_bound=2, on_exceeded=on_exceeded, lease_deadline_s=1000.0
    )
    world = World(buffer, clock, slots=12, duration_s=slow_prompts, learner_s=1.0)
    world.run(60, limit_s=400.0)
    status = buffer.snapshot()
    trained = Counter(trajectory.prompt_id for trajectory in world.trained)
    assert all(trained[f"row-{row}"] for row in range(5, 20))
    assert set(trained) | set(status.beyond_bound) >= SLOW
    slow_class, fast_class = 3, 0  # 4.5 s is up to 8 s; 0.5 s is up to 1 s
    assert status.sampled.by_duration[slow_class] > 0
    if on_exceeded == "drop":
        assert set(status.beyond_bound) == SLOW
        assert not SLOW & set(trained)
        assert status.trained.by_duration.keys() == {fast_class}
        assert status.length_bias < 1
    else:
        assert all(trained[prompt] for prompt in SLOW)
        assert status.beyond_bound == {}
        share = status.trained.by_duration[slow_class] / status.trained.count
        assert share == pytest.approx(5 / 20, abs=0.03)  # as often as in the data
    if on_exceeded == "wait":
        assert status.trained.max_staleness <= 2
    if on_exceeded == "mask":
        assert status.trained.max_staleness > 2  # kept whole, its oldest tokens masked by the learner


def test_wait_costs_time_and_mask_does_not() -> None:
    """The price of a strict bound when a quarter of the prompts are slow, in learner steps of 1 s for 40 batches."""
    seconds = {}
    for on_exceeded in ("mask", "wait"):
        clock = FakeClock()
        buffer = make_buffer(
            rows=20, clock=clock, batch_size=4, staleness_bound=1, on_exceeded=on_exceeded, lease_deadline_s=1000.0
        )
        World(buffer, clock, slots=12, duration_s=slow_prompts, learner_s=1.0).run(40, limit_s=400.0)
        seconds[on_exceeded] = clock.now
    assert seconds["mask"] < seconds["wait"]
