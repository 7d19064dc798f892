"""The replay buffer under anything that can happen: actors that die, hang, deliver late, twice, or rubbish; a learner
that dies and is restored; a buffer that is killed and started again from its store. The contract is checked after every
step.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer, ReplaySettings
from buffer.store import trajectory_bytes
from common.errors import WireError
from common.types import (
    Batch,
    BatchId,
    BatchOutcome,
    DropReason,
    Failure,
    GroupId,
    Lease,
    SampleState,
    Trajectory,
    WeightVersion,
)
from tests.buffer_kit import PROMPT_TOKENS, CopyingStore, FakeClock, Rows, lease_all, make_settings, rollout

ACTORS = ("actor-0", "actor-1", "actor-2")
LONGEST_TOKENS = PROMPT_TOKENS + 3
HELD = (SampleState.ASSEMBLING, SampleState.READY, SampleState.IN_TRAINING)
actors = st.sampled_from(ACTORS)
indices = st.integers(0, 1000)


@dataclass(frozen=True)
class Finished:
    """A batch in the surviving weights, as the learner remembers it."""

    batch_id: BatchId
    outcome: BatchOutcome
    sample_ids: frozenset[int]


@dataclass(frozen=True)
class Checkpoint:
    num_finished: int  # surviving batches in it
    last_finished: BatchId | None
    version: WeightVersion


class BufferMachine(RuleBasedStateMachine):
    """A buffer, and what an onlooker who sees all messages knows about it."""

    group_size: int
    bound: int

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store = CopyingStore()
        self.leases: dict[int, Lease] = {}  # all that were ever issued
        self.version_at_issue: dict[int, int] = {}
        self.held: dict[str, list[Lease]] = {actor: [] for actor in ACTORS}
        self.num_deaths = dict.fromkeys(ACTORS, 0)
        self.ghosts: list[Lease] = []  # given up, lost with their actor, or void: may still be delivered
        self.sent: list[Trajectory] = []
        self.usable: set[int] = set()  # samples of which a usable trajectory was accepted
        self.version = WeightVersion(0)
        self.published = WeightVersion(0)
        self.open: Batch | None = None
        self.finished: list[Finished] = []
        self.num_forgotten = 0  # of these
        self.checkpoints = [Checkpoint(0, None, WeightVersion(0))]
        self.brought_back = False
        self.prompts_seen: dict[int, tuple[int, str]] = {}  # unit -> epoch, prompt

    @initialize(
        on_exceeded=st.sampled_from(["mask", "drop", "wait"]),
        straggler=st.sampled_from(["retry", "close", "convert"]),
        units_per_batch=st.integers(1, 3),
        rows=st.sampled_from([3, 10]),
        epochs=st.sampled_from([1, 3, None]),
        max_attempts=st.integers(1, 3),
        batches_in_memory=st.sampled_from([1, 2, 100]),
    )
    def start(
        self,
        on_exceeded: str,
        straggler: str,
        units_per_batch: int,
        rows: int,
        epochs: int | None,
        max_attempts: int,
        batches_in_memory: int,
    ) -> None:
        batch_size = units_per_batch * self.group_size
        self.settings: ReplaySettings = make_settings(
            batch_size=batch_size,
            group_size=self.group_size,
            staleness_bound=self.bound,
            on_exceeded=on_exceeded,
            straggler=straggler,
            straggler_after_s=15.0,
            close_at=max(2, self.group_size - 1) if self.group_size > 1 else None,
            max_attempts=max_attempts,
            longest_trajectory_bytes=trajectory_bytes(LONGEST_TOKENS),
            max_bytes=batches_in_memory * batch_size * trajectory_bytes(LONGEST_TOKENS),
            max_no_update_in_a_row=10**6,
            max_lost_in_a_row=10**6,
        )
        self.rows, self.epochs = rows, epochs
        self.buffer = self.new_buffer()

    def new_buffer(self) -> ReplayBuffer:
        prompts = PromptSource(Rows(self.rows), seed=7, epochs=self.epochs)
        return ReplayBuffer(self.settings, prompts, self.clock, self.store)

    # Actors

    @rule(actor=actors, slots=st.integers(0, 6))
    def poll(self, actor: str, slots: int) -> None:
        before = self.buffer.ledger().issued
        leases = self.buffer.lease(self.actor_id(actor), slots)
        assert len(leases) <= slots
        status = self.buffer.snapshot()
        if status.counts.issued > before:
            assert status.live_samples <= (self.bound + 1) * self.settings.batch_size
            assert status.counts.issued - before <= len(leases) + self.group_size - 1
        if self.bound == 0 and self.open:
            assert not leases
        for lease in leases:
            assert lease.lease_id not in self.leases
            assert lease.min_weight_version == self.version
            assert lease.sample_id not in self.usable
            self.leases[lease.lease_id] = lease
            self.version_at_issue[lease.lease_id] = self.version
            seen = self.prompts_seen.setdefault(lease.group_id, (lease.prompt.epoch, lease.prompt.prompt_id))
            assert seen == (lease.prompt.epoch, lease.prompt.prompt_id)
            self.held[actor].append(lease)

    @rule(actor=actors, index=indices, first=st.integers(0, 6), last=st.integers(0, 6))
    def deliver(self, actor: str, index: int, first: int, last: int) -> None:
        if self.held[actor]:
            self.send(self.held[actor].pop(index % len(self.held[actor])), first, last)

    @rule(actor=actors, first=st.integers(0, 6), last=st.integers(0, 6))
    def deliver_everything(self, actor: str, first: int, last: int) -> None:
        while self.held[actor]:
            self.send(self.held[actor].pop(), first, last)

    @rule(index=indices, first=st.integers(0, 6))
    def deliver_from_the_grave(self, index: int, first: int) -> None:
        if self.ghosts:
            self.send(self.ghosts.pop(index % len(self.ghosts)), first, first)

    @rule(actor=actors, index=indices, reward=st.sampled_from([None, float("nan"), float("inf")]))
    def deliver_unscorable(self, actor: str, index: int, reward: float | None) -> None:
        if self.held[actor]:
            lease = self.held[actor].pop(index % len(self.held[actor]))
            self.buffer.complete(rollout(lease, reward=reward))

    @rule(actor=actors, index=indices)
    def deliver_empty(self, actor: str, index: int) -> None:
        if self.held[actor]:
            self.buffer.complete(rollout(self.held[actor].pop(index % len(self.held[actor])), []))

    @rule(index=indices)
    def deliver_again(self, index: int) -> None:
        if self.sent:
            before = self.buffer.ledger()
            assert not self.buffer.complete(self.sent[index % len(self.sent)]).accepted
            assert self.buffer.ledger() == before

    @rule(actor=actors, index=indices, reason=st.sampled_from(["failed", "over_long"]), uses_attempt=st.booleans())
    def fail(self, actor: str, index: int, reason: str, uses_attempt: bool) -> None:
        if self.held[actor]:
            lease = self.held[actor].pop(index % len(self.held[actor]))
            failure = Failure(reason=DropReason(reason), message="boom", uses_attempt=uses_attempt)
            self.buffer.fail(lease.lease_id, failure)
            self.ghosts.append(lease)

    @rule(actor=actors, noticed=st.booleans())
    def die(self, actor: str, noticed: bool) -> None:
        self.ghosts += self.held[actor]
        self.held[actor] = []
        if noticed:
            self.buffer.lose_actor(self.actor_id(actor))
            assert self.buffer.lease(self.actor_id(actor), 9) == []
            self.num_deaths[actor] += 1

    @rule(actor=actors)
    def heartbeat(self, actor: str) -> None:
        void = set(self.buffer.heartbeat(self.actor_id(actor), [lease.lease_id for lease in self.held[actor]]))
        self.ghosts += [lease for lease in self.held[actor] if lease.lease_id in void]
        self.held[actor] = [lease for lease in self.held[actor] if lease.lease_id not in void]

    def actor_id(self, actor: str) -> str:
        """Of the incarnation that lives."""
        return f"{actor}.{self.num_deaths[actor]}"

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0, 16.0, 61.0]), heartbeats=st.booleans())
    def time_passes(self, seconds: float, heartbeats: bool) -> None:
        for _ in range(int(seconds) // 4 + 1):
            self.clock.now += min(seconds, 4.0)
            seconds -= min(seconds, 4.0)
            if heartbeats:
                for actor in ACTORS:
                    self.heartbeat(actor)
        self.buffer.tick()

    # Learner

    @rule()
    def take(self) -> None:
        before = self.buffer.ledger()
        batch = self.buffer.take_batch()
        if self.open is not None:
            assert batch is not None
            assert batch.batch_id == self.open.batch_id
            assert ids(batch) == ids(self.open)
        elif batch is not None:
            self.check_new_batch(batch, nothing_outstanding=not (before.queued or before.leased or before.assembling))
            self.open = batch

    @precondition(lambda self: self.open)
    @rule(outcome=st.sampled_from([BatchOutcome.COMMITTED] * 4 + [BatchOutcome.NO_UPDATE, BatchOutcome.VALUE_WARMUP]))
    def finish(self, outcome: BatchOutcome) -> None:
        assert self.open is not None
        if outcome is BatchOutcome.COMMITTED:
            self.publish_ahead()
        elif self.published > self.version:
            return  # what was published was committed
        version = self.published
        for wrong in (WeightVersion(version + 1), WeightVersion(version - 1)):
            with pytest.raises(WireError):
                self.buffer.finish(self.open.batch_id, outcome, wrong)
        self.buffer.finish(self.open.batch_id, outcome, version)
        self.buffer.finish(self.open.batch_id, outcome, version)  # its acknowledgement was lost
        self.version = version
        self.finished.append(Finished(self.open.batch_id, outcome, frozenset(ids(self.open))))
        self.open = None

    @rule()
    def train(self) -> None:
        self.take()
        if self.open:
            self.finish(BatchOutcome.COMMITTED)

    @rule(batch_id=st.integers(-1, 20))
    def finish_a_batch_that_is_not_open(self, batch_id: int) -> None:
        if self.open is None or self.open.batch_id != batch_id:
            with pytest.raises(WireError):
                self.buffer.finish(BatchId(batch_id), BatchOutcome.COMMITTED, WeightVersion(self.version + 1))

    @precondition(lambda self: self.open)
    @rule()
    def publish_ahead(self) -> None:
        """The learner publishes before it finishes; it may die in between."""
        if self.published == self.version:
            self.published = WeightVersion(self.version + 1)
            self.buffer.note_published(self.published)

    @precondition(lambda self: self.open is None)
    @rule()
    def save_checkpoint(self) -> None:
        last = self.finished[-1].batch_id if self.finished else None
        self.checkpoints = [*self.checkpoints[-1:], Checkpoint(len(self.finished), last, self.version)]
        oldest = self.checkpoints[0]
        if oldest.last_finished is not None:
            self.buffer.forget_batches_up_to(oldest.last_finished)
            self.num_forgotten = oldest.num_finished

    @rule(newest=st.booleans())
    def learner_is_restored(self, newest: bool) -> None:
        checkpoint = self.checkpoints[-1 if newest else 0]
        label = self.buffer.restore(checkpoint.last_finished, checkpoint.version)
        assert label == (checkpoint.version if checkpoint.version == self.published else self.published + 1)
        self.version = self.published = label
        self.brought_back |= len(self.finished) > checkpoint.num_finished
        del self.finished[checkpoint.num_finished :]
        self.checkpoints = [old for old in self.checkpoints if old.num_finished <= checkpoint.num_finished]
        self.open = None

    # Buffer

    @rule()
    def buffer_is_killed_and_started_again(self) -> None:
        before, open_before = self.buffer.snapshot(), self.buffer.take_batch() if self.open else None
        self.buffer = self.new_buffer()
        after = self.buffer.snapshot()
        for name in ("counts", "version", "highest_version", "live_samples", "ready_units", "held_bytes", "open_batch"):
            assert getattr(after, name) == getattr(before, name), name
        for name in (
            "batches",
            "batches_kept",
            "prompts_left",
            "events",
            "sampled",
            "trained",
            "dropped",
            "beyond_bound",
        ):
            assert getattr(after, name) == getattr(before, name), name
        if open_before is not None:
            again = self.buffer.take_batch()
            assert again is not None
            assert ids(again) == ids(open_before)

    # Longer stretches, so that short histories get far

    @rule(rounds=st.integers(1, 5), laggard=actors, slots=st.integers(1, 12), last=st.integers(0, 2))
    def life_goes_on(self, rounds: int, laggard: str, slots: int, last: int) -> None:
        """Some rounds of training in which one actor delivers nothing."""
        for _ in range(rounds):
            for actor in ACTORS:
                self.poll(actor, slots)
                if actor != laggard:
                    self.deliver_everything(actor, 0, last)
            self.train()

    @rule(actor=actors, slots=st.integers(1, 12), keep=st.integers(0, 3), last=st.integers(0, 2))
    def deliver_most(self, actor: str, slots: int, keep: int, last: int) -> None:
        """An actor works, but for its last few rollouts."""
        self.poll(actor, slots)
        for lease in self.held[actor][: len(self.held[actor]) - keep]:
            self.send(lease, 0, last)
        self.held[actor] = self.held[actor][len(self.held[actor]) - keep :] if keep else []

    @rule(actor=actors, count=st.integers(1, 5), uses_attempt=st.booleans())
    def fail_many(self, actor: str, count: int, uses_attempt: bool) -> None:
        for index in range(count):
            self.poll(actor, 2)
            self.fail(actor, index, "failed", uses_attempt)

    # The contract, after every step

    @invariant()
    def every_sample_is_in_one_state(self) -> None:
        counts = self.buffer.ledger()
        assert counts.balanced
        assembly = self.buffer._assembly
        live = [sample for unit in assembly.pool.units.values() for sample in unit.samples]
        for state in (SampleState.QUEUED, SampleState.LEASED, *HELD):
            assert getattr(counts, state.value) == sum(sample.state is state for sample in live), state
        assert counts.leased == sum(1 for _ in assembly.book.leased())
        assert counts.in_training == (len(self.open.trajectories) if self.open else 0)

    @invariant()
    def no_sample_is_twice_in_the_surviving_weights(self) -> None:
        surviving = [sample for batch in self.finished for sample in batch.sample_ids]
        assert len(set(surviving)) == len(surviving)
        counts = self.buffer.ledger()
        no_update = [b for b in self.finished if b.outcome is BatchOutcome.NO_UPDATE]
        assert counts.dropped[DropReason.NO_UPDATE] == sum(len(batch.sample_ids) for batch in no_update)
        assert counts.trained == len(surviving) - counts.dropped[DropReason.NO_UPDATE]

    @invariant()
    def memory_is_bounded_and_nothing_is_left_behind(self) -> None:
        assembly = self.buffer._assembly
        live = [sample for unit in assembly.pool.units.values() for sample in unit.samples]
        held = [sample for sample in live if sample.state in HELD]
        assert assembly.held_bytes == sum(sample.size_bytes for sample in held)
        if not self.brought_back:
            assert assembly.held_bytes <= self.settings.max_bytes
            assert self.buffer.snapshot().live_samples <= (self.bound + 1) * self.settings.batch_size
        kept = {sample for batch in self.finished[self.num_forgotten :] for sample in batch.sample_ids}
        assert set(self.store.kept) == {sample.sample_id for sample in held} | kept

    @invariant()
    def the_version_never_goes_back(self) -> None:
        status = self.buffer.snapshot()
        assert (status.version, status.highest_version) == (self.version, self.published)

    @rule()
    def a_batch_can_still_form(self) -> None:
        """With every lease delivered, a batch forms, unless the data ends."""
        buffer, _ = copy.deepcopy((self.buffer, self.clock))
        if self.open:
            outcome = BatchOutcome.COMMITTED if self.published > self.version else BatchOutcome.NO_UPDATE
            buffer.finish(self.open.batch_id, outcome, self.published)
        for _ in range(3):  # what is stale goes first; what comes in its place is fresh
            for lease_id in [sample.lease_id for sample in buffer._assembly.book.leased()]:
                buffer.complete(rollout(self.leases[lease_id], self.published))
            for lease in lease_all(buffer, "healthy"):
                buffer.complete(rollout(lease, self.published))
            if buffer.take_batch() is not None or buffer.end_of_data:
                return
        raise AssertionError(f"no batch forms: waiting for {buffer.missing()}; {buffer.snapshot()}")

    def teardown(self) -> None:
        """Every actor is dead, one healthy one comes: the run goes to its end, and every prompt was used."""
        if not hasattr(self, "buffer"):
            return
        self.clock.now += 1000.0
        self.learner_is_restored(newest=True)
        for _ in range(200):
            self.poll("actor-0", 1000)
            self.deliver_everything("actor-0", 99, 99)
            self.train()
            self.every_sample_is_in_one_state()
            if self.buffer.end_of_data or len(self.finished) > 60:
                break
        else:
            raise AssertionError(f"the run does not end: {self.buffer.missing()}; {self.buffer.snapshot()}")
        if self.epochs is not None and self.buffer.end_of_data:
            wanted = [(epoch, f"row-{row}") for epoch in range(self.epochs) for row in range(self.rows)]
            assert sorted(self.prompts_seen.values()) == sorted(wanted)
            assert self.buffer.ledger().issued == len(wanted) * self.group_size

    def send(self, lease: Lease, first: int, last: int) -> None:
        """Deliver tokens from `first` to `last` versions after the one at issue, as far as any was published."""
        first = min(lease.min_weight_version + first, self.published)
        last = min(first + last, self.published)
        trajectory = rollout(lease, [first, last, last][: 1 + (last > first) * 2])
        self.sent.append(trajectory)
        if self.buffer.complete(trajectory).accepted:
            assert lease.sample_id not in self.usable
            self.usable.add(lease.sample_id)

    def check_new_batch(self, batch: Batch, *, nothing_outstanding: bool) -> None:
        limits, status = self.settings, self.buffer.snapshot()
        units: dict[int, list[Trajectory]] = defaultdict(list)
        for trajectory in batch.trajectories:
            units[trajectory.group_id].append(trajectory)
        assert batch.version == self.version
        assert [g for g in units for _ in units[g]] == [t.group_id for t in batch.trajectories]  # neighbours
        if batch.is_tail:
            assert len(units) < limits.units_per_batch
            assert status.prompts_left == 0
        else:
            assert len(units) == limits.units_per_batch
        if batch.is_tail or batch.is_last:
            assert status.counts.queued + status.counts.leased + status.counts.assembling == 0
        if batch.is_last:
            assert (status.counts.ready, status.prompts_left) == (0, 0)
        elif status.prompts_left == 0 and nothing_outstanding:
            assert status.counts.ready
        for unit_id, members in units.items():
            unit = self.buffer._assembly.pool.units[GroupId(unit_id)]
            self.check_unit(members, batch.version, converted=unit.converted)
        ages = [min((self.version_at_issue[t.lease_id], t.lease_id) for t in members) for members in units.values()]
        assert ages == sorted(ages)

    def check_unit(self, members: list[Trajectory], version: int, *, converted: bool) -> None:
        limits = self.settings
        assert len(members) == len({trajectory.sample_id for trajectory in members}) <= self.group_size
        if self.group_size > 1:
            assert len(members) >= (limits.close_at or 2 if converted else 2)
        assert not converted or limits.straggler == "convert"
        tokens = [int(v) for t in members for v in t.weight_versions[t.loss_mask]]
        if self.bound == 0:
            assert set(tokens) == {version}
        elif limits.on_exceeded == "mask":
            assert version - max(tokens) <= self.bound
        else:
            assert version - min(tokens) <= self.bound
        if limits.on_exceeded == "wait":
            assert version - min(self.version_at_issue[t.lease_id] for t in members) <= self.bound


def ids(batch: Batch) -> list[int]:
    return [trajectory.sample_id for trajectory in batch.trajectories]
