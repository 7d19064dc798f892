"""The replay buffer: what actors, learner and observers may ask for. Deterministic; the clock is handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from buffer import status
from buffer.assembly import Assembly
from buffer.batches import BatchBook
from buffer.prompts import PromptSource
from buffer.records import RunState, Stage, StoredRun
from buffer.settings import ReplaySettings
from buffer.status import BufferStatus
from buffer.store import Archive, Changes, MemoryStore, SampleStore
from common.errors import ConfigError, WireError
from common.types import (
    Batch,
    BatchId,
    BatchOutcome,
    DropReason,
    Failure,
    Lease,
    LeaseId,
    LedgerCounts,
    Receipt,
    SampleId,
    SampleState,
    Trajectory,
    WeightVersion,
)

__all__ = ["BufferStatus", "ReplayBuffer", "ReplaySettings"]

ACTOR_REASONS = (DropReason.FAILED, DropReason.OVER_LONG, DropReason.UNSCORABLE, DropReason.EMPTY)


class ReplayBuffer:
    """Issues leases, gathers what is delivered, and releases what may be trained on, oldest version first.

    Invariants, after every call: every issued sample is in exactly one state, and the counts add up; a unit leaves
    whole; no sample is in two finished batches that survive; there is at most one open batch; the live samples stay
    within (η + 1) · B but for what a restore brings back. Single-threaded. Every call that changes something is one
    `write` to the store before it returns; a buffer made over a store that holds a run goes on with it.

    Args:
        prompts: source of prompts; its cursor is set from the store if that holds a run.
        clock: seconds, never going back.
        store: None: in memory.
        state: what `state` returned, or a part of it, for a run that goes on without its store; not looked at if the
            store holds one.

    Raises:
        ConfigError: the run was started with another group size.
        DataError: the run was started with other data or another seed.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        prompts: PromptSource,
        clock: Callable[[], float],
        store: SampleStore | None = None,
        state: Mapping[str, Any] | None = None,
        archive: Archive | None = None,
    ) -> None:
        self._settings = settings
        self._archive = archive
        self._prompts = prompts
        self._clock = clock
        self._store: SampleStore = MemoryStore() if store is None else store
        stored = self._store.load()
        if stored is not None:
            self._run = stored.run
        else:
            fresh = RunState(group_size=settings.group_size, prompts=prompts.state())
            self._run = status.run_from_state({**status.state_of(fresh, (), None), **(state or {})})
        if self._run.group_size != settings.group_size:
            raise ConfigError(
                f"groups.size = {settings.group_size}: the run was started with {self._run.group_size}; set it back, "
                "or start with a new run directory"
            )
        prompts.restore(self._run.prompts)
        self._changes = Changes(run=self._run)
        self._assembly = Assembly(settings, self._run, self._changes, self._store, archive)
        self._batches = BatchBook(settings, self._run, self._changes, self._assembly)
        self._open_batch: Batch | None = None
        if stored is not None:
            self._adopt(stored)

    # For actors

    def lease(self, actor_id: str, num_slots: int) -> list[Lease]:
        """Up to `num_slots` leases for an actor, which is alive from now on. Never waits.

        [] while the gate is shut, and for an actor that was reported dead.

        Samples that wait for another attempt go first. One call hands out at most its share of what can be leased now,
        ceil(open leases / live actors) rounded up to whole groups, so that no actor gets everything. A group goes to
        one actor as far as its slots reach.
        """
        now = self._pass_time()
        book = self._assembly.book
        book.hear(actor_id, now)
        leases: list[Lease] = []
        if not self._shut and not book.buried(actor_id):
            size = self._settings.group_size
            open_leases = self._assembly.ledger.count(SampleState.QUEUED) + self._room() * size
            share = math.ceil(math.ceil(open_leases / book.num_actors) / size) * size
            while len(leases) < min(num_slots, share):
                sample = book.next_queued()
                if sample is not None:
                    leases.append(self._assembly.issue(sample, actor_id, now))
                elif self._room():
                    self._admit()
                else:
                    break
        self._commit()
        return leases

    def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        """The actor lives and works on these leases; returns those of them that are void, to be given up.

        A lease that is not named is not renewed: the answer that brought it may have been lost.
        """
        now = self._pass_time()
        void = self._assembly.book.renew(actor_id, lease_ids, now)
        self._commit()
        return void

    def complete(self, trajectory: Trajectory) -> Receipt:
        """Take a delivery, once, and only under the sample's current lease. Safe to repeat.

        A trajectory without a sampled token is dropped as empty, one without a finite reward as unscorable.

        Raises:
            WireError: the trajectory contradicts its lease.
        """
        now = self._pass_time()
        sample = self._assembly.book.current(trajectory.lease_id)
        if sample is None:
            return self._refuse(trajectory.lease_id, trajectory.sample_id)
        said = (trajectory.sample_id, trajectory.group_id, trajectory.attempt)
        meant = (sample.sample_id, sample.unit_id, sample.attempt)
        if said != meant:
            raise WireError(
                f"delivery under lease {trajectory.lease_id} is of (sample, group, attempt) {said}, not {meant}"
            )
        self._assembly.book.hear(sample.actor_id, now)
        unit = self._assembly.pool.units[sample.unit_id]
        receipt = self._assembly.deliver(sample, trajectory, now)
        self._assembly.settle(unit, now)
        # An engine may already serve weights whose batch the learner has yet to finish.
        self._run.highest_version = WeightVersion(max(self._run.highest_version, trajectory.newest_version))
        self._commit()
        return receipt

    def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        """Take a lease back without a trajectory: to be tried again while attempts are left, or dropped for good.

        Raises:
            ValueError: the reason is not one an actor can have.
        """
        if failure.reason not in ACTOR_REASONS:
            raise ValueError(f"failure of lease {lease_id}: reason {failure.reason} is not an actor's to give")
        now = self._pass_time()
        sample = self._assembly.book.current(lease_id)
        if sample is None:
            return self._refuse(lease_id, None)
        self._assembly.book.hear(sample.actor_id, now)
        unit = self._assembly.pool.units[sample.unit_id]
        self._assembly.fail(sample, failure.reason, failure.message, uses_attempt=failure.uses_attempt, now=now)
        self._assembly.settle(unit, now)
        self._commit()
        return Receipt(accepted=True)

    def lose_actor(self, actor_id: str) -> int:
        """The actor is dead: its leases go back to the pool without using up attempts. Returns how many.

        Its id is void from now on, so a replacement has another one. An actor that was only silent may come back.
        """
        num_lost = self._assembly.lose_actor(actor_id)
        self._assembly.book.bury(actor_id)
        self._commit()
        return num_lost

    def reported_dead(self, actor_id: str) -> bool:
        """Whether `lose_actor` named this id."""
        return self._assembly.book.buried(actor_id)

    def tick(self) -> None:
        """Let time pass: silent actors, leases past their limits, late members of groups."""
        self._pass_time()
        self._commit()

    # For the learner

    def take_batch(self) -> Batch | None:
        """The open batch, or a new one if one can be formed. What has become too stale is dropped either way."""
        self._pass_time()
        if self._open_batch is None:
            for unit in self._assembly.pool.ineligible(self._run.version):
                self._assembly.drop_unit(unit, DropReason.STALE)
            if self._batches.form(exhausted=self._exhausted) is not None:
                self._open_batch = self._read_batch()
        self._commit()
        return self._open_batch

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        """End the open batch. Safe to repeat with the same arguments.

        Args:
            version: the learner's version from now on: one more than before if committed, else the same.

        Raises:
            WireError: no such batch is open, or it ended otherwise, or `version` does not follow.
        """
        batch = self._open_batch
        self._batches.finish(batch_id, outcome, version)
        if batch is not None and batch.batch_id == batch_id:
            self._open_batch = None
            ending = "dropped_no_update" if outcome is BatchOutcome.NO_UPDATE else "trained"
            if self._archive is not None:
                for trajectory in batch.trajectories:
                    self._archive.add(trajectory, outcome=ending, batch_id=batch_id, version=batch.version)
        self._commit()

    def note_published(self, version: WeightVersion) -> None:
        """Weights of this label are about to be served, so no others may ever bear it. To be called before they are.

        Raises:
            WireError: the label goes back.
        """
        if version < self._run.highest_version:
            raise WireError(f"version {version} cannot be published: {self._run.highest_version} already was")
        if version > self._run.highest_version:
            self._run.highest_version = version
            self._changes.run_changed = True
            self._commit()

    def restore(self, last_finished_batch: BatchId | None, version: WeightVersion) -> WeightVersion:
        """The learner goes on from a checkpoint: samples of later batches are ready again, and the open batch is void.

        Args:
            last_finished_batch: the last batch in the checkpoint's weights; None: the starting model.
            version: the checkpoint's label.

        Returns:
            The label to publish under: `version` if no later label was ever published, else one that never was.

        Raises:
            RunFailedError: what the checkpoint needs is no longer known.
        """
        self._batches.check_checkpoint(last_finished_batch, version)
        self._batches.reopen()
        self._batches.return_after(last_finished_batch)
        self._open_batch = None
        if version != self._run.highest_version:
            self._run.highest_version = WeightVersion(self._run.highest_version + 1)
        self._run.version = self._run.highest_version
        self._run.no_update_in_a_row = 0
        self._changes.run_changed = True
        self._commit()
        return self._run.version

    def forget_batches_up_to(self, batch_id: BatchId) -> None:
        """Let go of all that belongs to batches up to this one: the oldest retained checkpoint covers them."""
        self._batches.forget_up_to(batch_id)
        self._commit()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds so that a new buffer without this one's store goes on where the last batch ended.

        Plain numbers, texts, lists and maps. Prompts of live units will be taken up again, so none is skipped.
        """
        return status.state_of(self._run, self._assembly.pool.units.values(), self._batches.last_finished)

    # For those who watch

    @property
    def num_rows(self) -> int:
        return self._prompts.num_rows

    @property
    def end_of_data(self) -> bool:
        """Nothing is left to be trained and nothing can come: the learner is to stop."""
        return self._exhausted and not self._assembly.pool.units

    @property
    def fatal(self) -> str | None:
        """Why the run cannot make progress; None: it can."""
        run, limits = self._run, self._settings
        if run.no_update_in_a_row >= limits.max_no_update_in_a_row:
            return (
                f"{run.no_update_in_a_row} batches in a row brought no update: their gradient was not finite, or they "
                "had no usable token (limit: buffer.max_no_update_in_a_row)"
            )
        losses = run.losses
        if losses.failed >= limits.max_lost_in_a_row:
            return f"{losses.failed} prompts in a row gave no usable trajectory; the first: {losses.first_failure}"
        if losses.failed + losses.over_long >= limits.max_lost_in_a_row and self._whole_pass_lost:
            return (
                f"a whole pass over the data, {self.num_rows} prompts, gave no usable trajectory; the first loss: "
                f"{losses.first}"
            )
        ever_usable = run.sampled.count or run.counts[SampleState.TRAINED]  # the latter of before a resume
        if losses.first and not ever_usable and self.end_of_data:
            return f"the data ended without one usable trajectory of {run.issued}; the first loss: {losses.first}"
        return None

    def ledger(self) -> LedgerCounts:
        """Samples by state."""
        return self._assembly.ledger.counts()

    def missing(self) -> str:
        """One line that names what is being waited for."""
        if self.fatal is not None:
            return f"nothing: {self.fatal}"
        if self.end_of_data:
            return "nothing: the data ended"
        open_batch = self._batches.open
        if open_batch is not None:
            return f"the learner, to finish batch {open_batch.batch_id} ({len(open_batch.unit_ids)} units)"
        num_actors = self._assembly.book.num_actors
        return status.describe_missing(
            self._assembly.pool, self._settings, self._clock(), num_actors=num_actors, room=self._room()
        )

    def snapshot(self) -> BufferStatus:
        """Everything worth a metric, at one moment."""
        run, pool = self._run, self._assembly.pool
        oldest = next(self._assembly.book.leased(), None)
        return BufferStatus(
            counts=self.ledger(),
            version=run.version,
            highest_version=run.highest_version,
            live_samples=pool.live_samples,
            ready_units=pool.num_ready,
            admission_limit=self._settings.admission_limit,
            admission_room=self._room() * self._settings.group_size,
            num_actors=self._assembly.book.num_actors,
            oldest_lease_s=self._clock() - oldest.issued_at if oldest else 0.0,
            held_bytes=self._assembly.held_bytes,
            open_batch=self._batches.open.batch_id if self._batches.open else None,
            batches=dict(run.batches),
            batches_kept=self._batches.num_kept,
            prompts_left=self._prompts_left,
            events=status.copy_events(run.events),
            sampled=status.copy_totals(run.sampled),
            trained=status.copy_totals(run.trained),
            dropped={reason: status.copy_totals(totals) for reason, totals in run.lost.items()},
            no_update_in_a_row=run.no_update_in_a_row,
            failed_prompts=tuple(run.failed_prompts),
            beyond_bound=dict(run.beyond_bound),
            fatal=self.fatal,
            end_of_data=self.end_of_data,
        )

    @property
    def _whole_pass_lost(self) -> bool:
        """Every prompt was handed out since the last usable trajectory, and has come to its end."""
        units = self._assembly.pool.units.values()
        pending = [unit.position for unit in units if unit.stage is Stage.ASSEMBLING] + self._run.pending_positions
        ended_before = min([self._prompts.position, *pending])
        return ended_before - self._run.losses.since_position >= self.num_rows

    @property
    def _prompts_left(self) -> int | None:
        left = self._prompts.remaining
        return None if left is None else left + len(self._run.pending_positions)

    @property
    def _exhausted(self) -> bool:
        return self._prompts_left == 0

    @property
    def _shut(self) -> bool:
        """Nothing is leased, retries included. At η = 0 what is sampled while a batch is in training would be stale."""
        return self.fatal is not None or (self._settings.staleness_bound == 0 and self._batches.open is not None)

    def _room(self) -> int:
        """Units that may be admitted now."""
        left = self._prompts_left
        return self._assembly.room() if left is None else min(self._assembly.room(), left)

    def _admit(self) -> None:
        if self._run.pending_positions:
            position = self._run.pending_positions.pop(0)
            self._assembly.admit(self._prompts.at(position), position)
            return
        position = self._prompts.position
        prompt = self._prompts.next()
        assert prompt is not None
        self._run.prompts = self._prompts.state()
        self._assembly.admit(prompt, position)

    def _refuse(self, lease_id: LeaseId, sample_id: SampleId | None) -> Receipt:
        events = self._run.events
        sample = self._assembly.samples.get(sample_id) if sample_id is not None else None
        if not 0 <= lease_id < self._run.next_lease:
            events.unknown_deliveries += 1
            reason = "unknown lease"
        elif sample is not None and sample.lease_id == lease_id:
            events.duplicate_deliveries += 1
            reason = "duplicate"
        else:
            events.late_deliveries += 1
            reason = "late"
        self._changes.run_changed = True
        self._commit()
        return Receipt(accepted=False, reason=reason)

    def _read_batch(self) -> Batch:
        """The open batch with its trajectories."""
        record = self._batches.open
        assert record is not None
        return Batch(
            batch_id=record.batch_id,
            version=record.version,
            trajectories=tuple(self._store.payloads(self._batches.sample_ids())),
            is_last=record.is_last,
            is_tail=record.is_tail,
        )

    def _pass_time(self) -> float:
        now = self._clock()
        self._assembly.run_timers(now)
        return now

    def _adopt(self, stored: StoredRun) -> None:
        now = self._clock()
        for unit_id in sorted(stored.units):
            if stored.units[unit_id].stage is not Stage.GONE:
                self._assembly.adopt(stored.units[unit_id], now)
        self._batches.adopt(stored)
        if self._batches.open is not None:
            self._open_batch = self._read_batch()

    def _commit(self) -> None:
        if not self._changes.empty:
            self._store.write(self._changes)
            self._changes.clear()
