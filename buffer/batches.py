"""Batches: formed, open, finished, brought back by a restore, forgotten."""

from __future__ import annotations

from buffer import groups
from buffer.assembly import Assembly
from buffer.ledger import add_to
from buffer.records import BatchRecord, RunState, Sample, Stage, StoredRun, Totals, Unit
from buffer.settings import ReplaySettings
from buffer.store import Changes
from common.errors import RunFailedError, WireError
from common.types import BatchId, BatchOutcome, DropReason, GroupId, SampleId, SampleState, WeightVersion


class BatchBook:
    """At most one open batch, and the finished ones that a checkpoint may still bring back.

    Batches are numbered in the order they are formed and no number is used again, so "later" means a higher number.
    """

    def __init__(self, settings: ReplaySettings, run: RunState, changes: Changes, assembly: Assembly) -> None:
        self._settings = settings
        self._run = run
        self._changes = changes
        self._assembly = assembly
        self._finished: dict[BatchId, BatchRecord] = {}  # in order; those in the surviving weights
        self._retired: dict[GroupId, Unit] = {}  # their units
        self.open: BatchRecord | None = None

    @property
    def num_kept(self) -> int:
        return len(self._finished)

    @property
    def last_finished(self) -> BatchId | None:
        """Of those in the surviving weights."""
        return next(reversed(self._finished), self._run.forgotten_up_to)

    def adopt(self, stored: StoredRun) -> None:
        """Take up the batches of a run that goes on; live units are in the assembly already."""
        for batch_id in sorted(stored.batches):
            record = stored.batches[batch_id]
            if record.outcome is None:
                self.open = record
                continue
            self._finished[batch_id] = record
            for unit_id in record.unit_ids:
                unit = self._retired[unit_id] = stored.units[unit_id]
                self._assembly.samples.update((sample.sample_id, sample) for sample in unit.samples)

    def form(self, *, exhausted: bool) -> BatchRecord | None:
        """Open a batch of the oldest ready units, if there are enough of them, or no more can come.

        Args:
            exhausted: no prompt is left to be admitted.
        """
        assert self.open is None
        pool = self._assembly.pool
        num_units = self._settings.units_per_batch
        is_tail = pool.num_ready < num_units
        if is_tail:
            if not exhausted or not pool.num_ready or pool.num_ready < len(pool.units):
                return None
            num_units = pool.num_ready
        if not pool.may_take(num_units, self._run.version):
            return None
        is_last = exhausted and num_units == len(pool.units)
        units = pool.take(num_units)
        for unit in units:
            for sample in groups.usable(unit):
                self._assembly.move(sample, SampleState.IN_TRAINING)
            self._changes.units[unit.unit_id] = unit
        self.open = BatchRecord(
            batch_id=BatchId(self._run.next_batch),
            version=self._run.version,
            unit_ids=tuple(unit.unit_id for unit in units),
            is_last=is_last,
            is_tail=is_tail,
        )
        self._run.next_batch += 1
        self._changes.batches[self.open.batch_id] = self.open
        return self.open

    def open_units(self) -> list[Unit]:
        """Units of the open batch, in order."""
        return [self._assembly.pool.units[unit_id] for unit_id in self.open.unit_ids] if self.open else []

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        """See `ReplayBuffer.finish`."""
        record = self.open
        if record is None or record.batch_id != batch_id:
            self._expect_finished(batch_id, outcome, version)
            return
        expected = self._run.version + (1 if outcome is BatchOutcome.COMMITTED else 0)
        if version != expected:
            raise WireError(f"batch {batch_id} finished as {outcome} must leave version {expected}, not {version}")
        record.outcome, record.finished_version = outcome, version
        for unit in self.open_units():
            for sample in groups.usable(unit):
                self._end(sample, record, trained=outcome is not BatchOutcome.NO_UPDATE)
            if outcome is not BatchOutcome.NO_UPDATE:
                self._run.beyond_bound.pop(unit.prompt.prompt_id, None)
            self._assembly.pool.remove(unit)
            self._retired[unit.unit_id] = unit
            self._changes.units[unit.unit_id] = unit
        self._finished[batch_id] = record
        self.open = None
        self._changes.batches[batch_id] = record
        self._run.batches[outcome] += 1
        self._run.no_update_in_a_row = self._run.no_update_in_a_row + 1 if outcome is BatchOutcome.NO_UPDATE else 0
        self._run.version = version
        self._run.highest_version = max(self._run.highest_version, version)

    def reopen(self) -> None:
        """The open batch will not be finished: its samples are ready again, and its number is void."""
        if self.open is None:
            return
        for unit in self.open_units():
            for sample in groups.usable(unit):
                self._assembly.move(sample, SampleState.READY)
                self._run.events.returned_by_restore += 1
            self._assembly.pool.make_ready(unit)
            self._changes.units[unit.unit_id] = unit
        self._changes.removed_batches.append(self.open.batch_id)
        self.open = None

    def return_after(self, last_finished: BatchId | None) -> None:
        """Samples of the finished batches after this one are ready again."""
        for batch_id in [known for known in self._finished if last_finished is None or known > last_finished]:
            record = self._finished.pop(batch_id)
            for unit_id in record.unit_ids:
                unit = self._retired.pop(unit_id)
                for sample in unit.samples:
                    if groups.in_finished_batch(sample):
                        add_to(self._totals(sample), sample, step=-1)
                        self._assembly.move(sample, SampleState.READY)
                        self._assembly.held_bytes += sample.size_bytes
                        self._run.events.returned_by_restore += 1
                unit.stage = Stage.READY
                self._assembly.pool.add(unit)
                self._changes.units[unit_id] = unit
            self._changes.removed_batches.append(batch_id)

    def forget_up_to(self, batch_id: BatchId) -> None:
        """See `ReplayBuffer.forget_batches_up_to`."""
        for known in [known for known in self._finished if known <= batch_id]:
            for unit_id in self._finished.pop(known).unit_ids:
                self._assembly.forget(self._retired.pop(unit_id))
            self._changes.removed_batches.append(known)
            self._run.forgotten_up_to = known

    def check_checkpoint(self, last_finished: BatchId | None, version: WeightVersion) -> None:
        """Refuse a checkpoint whose later batches cannot all be brought back.

        Raises:
            RunFailedError: they were forgotten, or its weights hold batches that were brought back since.
        """
        if version > self._run.highest_version:
            raise RunFailedError(
                f"the checkpoint is of version {version}, and this run never got beyond {self._run.highest_version}: "
                "it belongs to another run, or the buffer's store was removed; start with a new run directory"
            )
        known = last_finished in self._finished or last_finished == self._run.forgotten_up_to
        if not known and not (last_finished is None and self._run.forgotten_up_to is None):
            first = "the start" if last_finished is None else f"batch {last_finished}"
            raise RunFailedError(
                f"the checkpoint ends at {first}, and what was trained after it cannot be brought back (the batches "
                f"still known are {list(self._finished) or 'none'}): restore a newer checkpoint"
            )

    def _expect_finished(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        known = self._finished.get(batch_id)
        if known is None or (known.outcome, known.finished_version) != (outcome, version):
            ended = f"ended as {known.outcome} at version {known.finished_version}" if known else "is unknown or void"
            raise WireError(f"batch {batch_id} {ended}: it cannot be finished as {outcome} at version {version}")

    def _end(self, sample: Sample, record: BatchRecord, *, trained: bool) -> None:
        if trained:
            self._assembly.move(sample, SampleState.TRAINED)
        else:
            self._assembly.move(sample, SampleState.DROPPED, DropReason.NO_UPDATE)
        self._assembly.held_bytes -= sample.size_bytes
        add_to(self._totals(sample), sample, staleness=record.version - sample.oldest_version)

    def _totals(self, sample: Sample) -> Totals:
        return self._run.lost[sample.drop_reason] if sample.drop_reason else self._run.trained

    def sample_ids(self) -> list[SampleId]:
        """Of the open batch, units in order and members in theirs."""
        return [sample.sample_id for unit in self.open_units() for sample in groups.usable(unit)]
