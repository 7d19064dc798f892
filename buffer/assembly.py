"""Samples on their way from admission to a ready unit: leases, deliveries, failures, late members, losses."""

from __future__ import annotations

import logging
import math

from buffer import groups, staleness, status
from buffer.groups import Verdict
from buffer.leases import Expiry, LeaseBook, Timers, sampling_seed
from buffer.ledger import Ledger, add_to
from buffer.pool import UnitPool
from buffer.records import Losses, RunState, Sample, Stage, Unit
from buffer.settings import ReplaySettings
from buffer.store import Archive, Changes, SampleStore, trajectory_bytes
from common.types import DropReason, GroupId, Lease, LeaseId, Prompt, Receipt, SampleId, SampleState, Trajectory

logger = logging.getLogger(__name__)

REMEMBERED_PROMPTS = 1000  # names kept of prompts that failed, and of prompts that went beyond the bound


class Assembly:
    """The live part of the buffer, without its interface: every method is one step that leaves the ledger balanced.

    Time is handed in as `now`, clock seconds. Everything that changes is noted in `changes`.
    """

    def __init__(
        self, settings: ReplaySettings, run: RunState, changes: Changes, store: SampleStore, archive: Archive | None
    ) -> None:
        self._settings = settings
        self._run = run
        self._changes = changes
        self._store = store
        self._archive = archive
        self._late_timers: Timers[int] = Timers()  # by unit
        self.ledger = Ledger(run)
        self.book = LeaseBook(heartbeat_s=settings.heartbeat_s, deadline_s=settings.lease_deadline_s)
        self.pool = UnitPool(settings)
        self.samples: dict[SampleId, Sample] = {}  # of live units, and of finished batches that may be brought back
        self.held_bytes = 0  # delivered trajectories of live units

    # Admission

    def room(self) -> int:
        """Units that the admission limit and the byte limit let in now, prompts permitting."""
        limits, live = self._settings, self.pool.live_samples
        outstanding = self.ledger.count(SampleState.QUEUED) + self.ledger.count(SampleState.LEASED)
        return min(
            staleness.admissible(
                live, bound=limits.staleness_bound, batch_size=limits.batch_size, unit_size=limits.group_size
            ),
            staleness.fitting(
                live,
                self.held_bytes + outstanding * limits.longest_trajectory_bytes,
                unit_size=limits.group_size,
                batch_size=limits.batch_size,
                max_bytes=limits.max_bytes,
                longest_bytes=limits.longest_trajectory_bytes,
            ),
        )

    def admit(self, prompt: Prompt, position: int) -> None:
        """A new unit; its members are queued."""
        unit = Unit(unit_id=GroupId(self._run.next_unit), position=position, prompt=prompt)
        self._run.next_unit += 1
        for _ in range(self._settings.group_size):
            sample = Sample(sample_id=SampleId(self._run.next_sample), unit_id=unit.unit_id)
            self._run.next_sample += 1
            unit.samples.append(sample)
            self.samples[sample.sample_id] = sample
            self.ledger.issue(sample)
            self.book.enqueue(sample)
            self._changes.samples[sample.sample_id] = sample
        self.pool.add(unit)
        self._changes.units[unit.unit_id] = unit

    def issue(self, sample: Sample, actor_id: str, now: float) -> Lease:
        """Lease a sample that was taken from the queue."""
        lease_id = LeaseId(self._run.next_lease)
        self._run.next_lease += 1
        self.book.issue(sample, lease_id, actor_id, self._run.version, now)
        self.move(sample, SampleState.LEASED)
        unit = self.pool.units[sample.unit_id]
        self.pool.reorder(unit)
        self._watch_late(unit)
        return Lease(
            lease_id=lease_id,
            sample_id=sample.sample_id,
            attempt=sample.attempt,
            group_id=unit.unit_id,
            group_size=unit.size,
            prompt=unit.prompt,
            min_weight_version=self._run.version,
            seed=sampling_seed(self._settings.seed, sample.sample_id, sample.attempt),
            time_left_s=self._settings.lease_deadline_s,
        )

    # Ends of a lease. Each is followed by `settle`.

    def deliver(self, sample: Sample, trajectory: Trajectory, now: float) -> Receipt:
        """Judge a delivery under the sample's current lease."""
        sample.duration_s = now - sample.issued_at
        sample.num_sampled = trajectory.num_sampled
        if sample.num_sampled and trajectory.oldest_version < sample.version_at_issue:
            self.book.void(sample)
            self._fail_attempt(
                sample,
                f"actor {sample.actor_id} sampled with version {trajectory.oldest_version}; its lease asks for "
                f"{sample.version_at_issue} or later",
            )
            return Receipt(accepted=False, reason="older than the lease allows")
        self.book.close(sample)
        if not sample.num_sampled:
            self._lose(sample, DropReason.EMPTY, trajectory.error or "no token was sampled", trajectory)
        elif trajectory.reward is None or not math.isfinite(trajectory.reward):
            message = trajectory.error or f"the reward is {trajectory.reward}"
            self._lose(sample, DropReason.UNSCORABLE, message, trajectory)
        else:
            self._keep(sample, trajectory, float(trajectory.reward), now)
        return Receipt(accepted=True)

    def fail(self, sample: Sample, reason: DropReason, message: str, *, uses_attempt: bool, now: float) -> None:
        """The actor gave the lease up."""
        sample.duration_s = now - sample.issued_at
        self.book.close(sample)
        if reason is not DropReason.FAILED:
            self._lose(sample, reason, message)
        elif uses_attempt:
            self._fail_attempt(sample, message)
        else:
            self._run.events.lost_leases += 1
            self._requeue(sample)

    def lose_actor(self, actor_id: str) -> int:
        """The actor is gone; returns how many leases went back to the pool. No attempt is used up."""
        if not self.book.knows(actor_id):
            return 0
        lost = self.book.forget_actor(actor_id)
        self._run.events.lost_actors += 1
        self._run.events.lost_leases += len(lost)
        self._changes.run_changed = True
        for sample in lost:
            self._requeue(sample)
            self.pool.reorder(self.pool.units[sample.unit_id])
        return len(lost)

    def settle(self, unit: Unit, now: float) -> None:
        """A member changed: the unit is whole, or lost, or waits on."""
        if unit.stage is not Stage.ASSEMBLING:
            return
        decision = groups.verdict(unit)
        if decision is Verdict.WAIT:
            self.pool.reorder(unit)
            self._handle_late(unit, now)
        elif decision is Verdict.TOO_FEW:
            self._count_loss(unit)
            self.drop_unit(unit, DropReason.INCOMPLETE_GROUP)
        else:
            for sample in groups.usable(unit):
                self.move(sample, SampleState.READY)
            self.pool.make_ready(unit)
            self._changes.units[unit.unit_id] = unit
            self._run.events.uninformative_groups += groups.uninformative(unit)

    # Time

    def run_timers(self, now: float) -> None:
        """All that time alone brings about: silent actors, leases that ran out, late members."""
        for actor_id in self.book.silent_actors(now):
            self.lose_actor(actor_id)
        for sample, cause in self.book.expired(now):
            if not self.book.holds(sample):
                continue  # went with its group a moment ago
            unit = self.pool.units[sample.unit_id]
            sample.duration_s = now - sample.issued_at
            self.book.void(sample)
            if cause is Expiry.SILENT:
                self._run.events.lost_leases += 1
                self._requeue(sample)
            else:
                self._run.events.expired_leases += 1
                limit_s = self._settings.lease_deadline_s
                self._fail_attempt(sample, f"actor {sample.actor_id} did not deliver within {limit_s:g} s")
            self.settle(unit, now)
        for unit_id in self._late_timers.pop_due(now, self._late_at):
            self._handle_late(self.pool.units[GroupId(unit_id)], now)

    # Units that leave

    def drop_unit(self, unit: Unit, reason: DropReason) -> None:
        """Drop what is left of a unit, and forget it."""
        for sample in unit.samples:
            if sample.state is not SampleState.DROPPED:
                self._drop(sample, reason)
        if reason is DropReason.STALE:
            self._note_beyond_bound(unit.prompt.prompt_id)
        self.pool.remove(unit)
        self.forget(unit)

    def forget(self, unit: Unit) -> None:
        """A unit that left can never come back."""
        for sample in unit.samples:
            del self.samples[sample.sample_id]
        self._changes.removed_units.append(unit.unit_id)

    def move(self, sample: Sample, to: SampleState, reason: DropReason | None = None) -> None:
        """Change a sample's state."""
        self.ledger.move(sample, to, reason)
        self._changes.samples[sample.sample_id] = sample

    # A run that goes on

    def adopt(self, unit: Unit, now: float) -> None:
        """Take up a live unit from the store. Its leases stand, with all their time from now."""
        if unit.first_delivery_at is not None:
            unit.first_delivery_at = now
        for sample in unit.samples:
            self.samples[sample.sample_id] = sample
            if sample.state is SampleState.QUEUED:
                self.book.enqueue(sample)
            elif sample.state is SampleState.LEASED:
                sample.issued_at = now
                self.book.hear(sample.actor_id, now)
                self.book.adopt(sample, now)
            elif sample.state is not SampleState.DROPPED:
                self.held_bytes += sample.size_bytes
        self.pool.add(unit)
        self._watch_late(unit)

    def _keep(self, sample: Sample, trajectory: Trajectory, reward: float, now: float) -> None:
        """A usable trajectory."""
        sample.reward = reward
        sample.oldest_version, sample.newest_version = trajectory.oldest_version, trajectory.newest_version
        sample.size_bytes = trajectory_bytes(len(trajectory.token_ids))
        self.held_bytes += sample.size_bytes
        self._changes.payloads[sample.sample_id] = trajectory
        self.move(sample, SampleState.ASSEMBLING)
        add_to(self._run.sampled, sample)
        self._run.losses = Losses(since_position=self._run.prompts["position"])
        unit = self.pool.units[sample.unit_id]
        if unit.first_delivery_at is None:
            unit.first_delivery_at = now
            self._changes.units[unit.unit_id] = unit
        self._watch_late(unit)

    def _fail_attempt(self, sample: Sample, message: str) -> None:
        """The sample itself failed under the lease that ended."""
        sample.attempt += 1
        self._run.events.failed_attempts += 1
        if sample.attempt < self._settings.max_attempts:
            self._run.events.retries += 1
            self._requeue(sample)
        else:
            self._lose(sample, DropReason.FAILED, f"{message} (all {sample.attempt} attempts are used up)")

    def _requeue(self, sample: Sample) -> None:
        self.book.enqueue(sample)
        self.move(sample, SampleState.QUEUED)

    def _lose(self, sample: Sample, reason: DropReason, message: str, trajectory: Trajectory | None = None) -> None:
        """A sample ended without a usable trajectory; `trajectory` is one that cannot be used."""
        prompt_id = self.pool.units[sample.unit_id].prompt.prompt_id
        logger.warning("sample %d (prompt %s) dropped: %s: %s", sample.sample_id, prompt_id, reason, message)
        losses, line = self._run.losses, f"sample {sample.sample_id} (prompt {prompt_id}): {reason}: {message}"
        if reason is DropReason.OVER_LONG:
            losses.first_over_long = losses.first_over_long or line
        else:
            losses.first_failure = losses.first_failure or line
        if reason is DropReason.FAILED:
            self._run.failed_prompts = [*self._run.failed_prompts[1 - REMEMBERED_PROMPTS :], prompt_id]
        self._drop(sample, reason, trajectory)

    def _count_loss(self, unit: Unit) -> None:
        """Too few members are left."""
        reasons = {sample.drop_reason for sample in unit.samples if sample.state is SampleState.DROPPED}
        if reasons == {DropReason.OVER_LONG}:
            self._run.losses.over_long += 1
        else:
            self._run.losses.failed += 1

    def _drop(self, sample: Sample, reason: DropReason, trajectory: Trajectory | None = None) -> None:
        """Take a sample out of its unit for good, whatever its state."""
        if self.book.holds(sample):
            self.book.void(sample)
        if sample.size_bytes:
            trajectory = self._payload(sample.sample_id)
            self.held_bytes -= sample.size_bytes
            self._changes.removed_payloads.append(sample.sample_id)
        if trajectory is not None and self._archive is not None:
            self._archive.add(trajectory, outcome=f"dropped_{reason}", batch_id=-1, version=self._run.version)
        staleness_now = self._run.version - sample.oldest_version if sample.size_bytes else 0
        add_to(self._run.lost[reason], sample, staleness=staleness_now)
        self.move(sample, SampleState.DROPPED, reason)

    def _payload(self, sample_id: SampleId) -> Trajectory | None:
        """Of a delivered sample, if anybody wants it."""
        if self._archive is None:
            return None
        return self._changes.payloads.get(sample_id) or self._store.payloads([sample_id])[0]

    def _note_beyond_bound(self, prompt_id: str) -> None:
        beyond, events = self._run.beyond_bound, self._run.events
        beyond[prompt_id] = beyond.pop(prompt_id, 0) + 1
        if len(beyond) > REMEMBERED_PROMPTS:
            del beyond[next(iter(beyond))]
        events.stale_units += 1
        if events.stale_units.bit_count() == 1:  # at 1, 2, 4, 8, ...: a run that loses many says so a few times
            logger.warning("%s", status.describe_stale(self._run, self._settings.staleness_bound))

    # Late members of groups

    def _watch_late(self, unit: Unit) -> None:
        due = groups.late_at(unit, self._settings) if unit.size > 1 else None
        if due is not None:
            self._late_timers.push(due, unit.unit_id)

    def _late_at(self, unit_id: int) -> float | None:
        unit = self.pool.units.get(GroupId(unit_id))
        return None if unit is None else groups.late_at(unit, self._settings)

    def _handle_late(self, unit: Unit, now: float) -> None:
        """Try late members again, or go on without them."""
        late = groups.late_members(unit, self._settings, now) if unit.size > 1 else []
        if not late:
            return
        if self._settings.straggler == "retry":
            assert unit.first_delivery_at is not None
            waited_s = now - unit.first_delivery_at
            for sample in late:
                sample.duration_s = now - sample.issued_at
                self.book.void(sample)
                self._run.events.straggler_retries += 1
                self._fail_attempt(sample, f"{waited_s:g} s behind the first delivery of its group")
            self._watch_late(unit)
        else:
            unit.converted = self._settings.straggler == "convert"
            self._run.events.converted_groups += unit.converted
            self._run.events.closed_groups += not unit.converted
            for sample in late:
                self._drop(sample, DropReason.INCOMPLETE_GROUP)
        self.settle(unit, now)
