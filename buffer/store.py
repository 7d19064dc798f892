"""Where the buffer's rows and the payloads live. The store keeps; `ReplayBuffer` decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from buffer.records import BatchRecord, RunState, Sample, StoredRun, Unit
from common.types import BatchId, GroupId, SampleId, Trajectory

BYTES_PER_TOKEN = 13  # token id 4, mask 1, log-prob 4, version 4
OVERHEAD_BYTES = 1024  # names, turns, metrics


def trajectory_bytes(num_tokens: int) -> int:
    """What a trajectory of this many tokens, prompt and observations included, counts against the byte limit."""
    return OVERHEAD_BYTES + BYTES_PER_TOKEN * num_tokens


@dataclass(slots=True, kw_only=True)
class Changes:
    """What one operation of the buffer changed. The rows, and this record, are the buffer's own and change again."""

    run: RunState
    run_changed: bool = False  # set when nothing else shows it
    samples: dict[SampleId, Sample] = field(default_factory=dict)  # new or changed
    units: dict[GroupId, Unit] = field(default_factory=dict)  # new or changed; their samples are listed by themselves
    batches: dict[BatchId, BatchRecord] = field(default_factory=dict)  # new or changed
    payloads: dict[SampleId, Trajectory] = field(default_factory=dict)  # delivered
    removed_payloads: list[SampleId] = field(default_factory=list)
    removed_units: list[GroupId] = field(default_factory=list)  # with their samples and payloads
    removed_batches: list[BatchId] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        rows = self.samples or self.units or self.batches or self.removed_units or self.removed_batches
        return not (rows or self.run_changed)

    def clear(self) -> None:
        """Everything is kept; start anew."""
        self.run_changed = False
        for rows in (self.samples, self.units, self.batches, self.payloads):
            rows.clear()
        for removed in (self.removed_payloads, self.removed_units, self.removed_batches):
            removed.clear()


class SampleStore(Protocol):
    """Keeps what the buffer hands it, and gives it back when a buffer starts again."""

    def load(self) -> StoredRun | None:
        """What the last completed `write` left; None: nothing was ever written."""
        ...

    def write(self, changes: Changes) -> None:
        """Keep all of `changes` or none of it; removals come after additions.

        When this returns, the caller of the operation is answered, so a durable store has made it durable. A store that
        outlives the process serialises the rows here.

        Raises:
            ResourceError: there is no room; nothing was kept.
        """
        ...

    def payloads(self, sample_ids: Sequence[SampleId]) -> list[Trajectory]:
        """Trajectories in the order asked for."""
        ...


class Archive(Protocol):
    """Told of every trajectory that comes to an end. One that a restore brings back ends again."""

    def add(self, trajectory: Trajectory, *, outcome: str, batch_id: int, version: int) -> None:
        """`outcome`: `trained` or `dropped_` with the reason; `batch_id` -1: none; `version`: the learner's by then."""
        ...


class MemoryStore:
    """Lives and dies with the process, and shares its rows with the buffer."""

    def __init__(self) -> None:
        self._run: RunState | None = None
        self._units: dict[GroupId, Unit] = {}
        self._batches: dict[BatchId, BatchRecord] = {}
        self._payloads: dict[SampleId, Trajectory] = {}

    def load(self) -> StoredRun | None:
        if self._run is None:
            return None
        return StoredRun(run=self._run, units=dict(self._units), batches=dict(self._batches))

    def write(self, changes: Changes) -> None:
        self._run = changes.run
        self._units.update(changes.units)
        self._batches.update(changes.batches)
        self._payloads.update(changes.payloads)
        for sample_id in changes.removed_payloads:
            self._payloads.pop(sample_id, None)
        for unit_id in changes.removed_units:
            unit = self._units.pop(unit_id, None)
            for sample in unit.samples if unit else ():
                self._payloads.pop(sample.sample_id, None)
        for batch_id in changes.removed_batches:
            self._batches.pop(batch_id, None)

    def payloads(self, sample_ids: Sequence[SampleId]) -> list[Trajectory]:
        return [self._payloads[sample_id] for sample_id in sample_ids]
