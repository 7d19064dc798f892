"""A replay buffer for tests: a clock moved by hand, rows without a file, a store that keeps copies, deliveries."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from buffer.prompts import PromptSource
from buffer.records import BatchRecord, RunState, Sample, StoredRun, Unit
from buffer.replay import ReplayBuffer, ReplaySettings
from buffer.store import Changes, SampleStore
from common.types import (
    Batch,
    BatchId,
    BatchOutcome,
    DropReason,
    FinishReason,
    GroupId,
    Lease,
    Prompt,
    Receipt,
    SampleId,
    Trajectory,
    Turn,
    WeightVersion,
)

PROMPT_TOKENS = 2


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Rows:
    """`n` prompts named row-0 .. row-(n-1)."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return Prompt(prompt_id=f"row-{index}", epoch=0, text=f"text {index}")


def make_settings(**changes: Any) -> ReplaySettings:
    """Batches of 4 single rollouts, unless told otherwise."""
    return ReplaySettings(**{"seed": 7, "batch_size": 4, "heartbeat_s": 10.0, "lease_deadline_s": 60.0, **changes})


def make_buffer(
    *,
    rows: int = 100,
    epochs: int | None = None,
    clock: FakeClock | None = None,
    store: SampleStore | None = None,
    archive: Any = None,
    **settings: Any,
) -> ReplayBuffer:
    chosen = make_settings(**settings)
    prompts = PromptSource(Rows(rows), seed=chosen.seed, epochs=epochs)
    return ReplayBuffer(chosen, prompts, clock or FakeClock(), store, archive=archive)


def rollout(lease: Lease, versions: int | Sequence[int] | None = None, *, reward: float | None = 1.0) -> Trajectory:
    """What an actor delivers under a lease.

    Args:
        versions: weight version of each sampled token; an int: one token of it; None: one token of the least version
            the lease allows; empty: nothing was sampled.
    """
    if versions is None:
        versions = lease.min_weight_version
    sampled = [versions] if isinstance(versions, int) else list(versions)
    total = PROMPT_TOKENS + len(sampled)
    mask = np.arange(total) >= PROMPT_TOKENS
    return Trajectory(
        sample_id=lease.sample_id,
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        prompt_id=lease.prompt.prompt_id,
        epoch=lease.prompt.epoch,
        attempt=lease.attempt,
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        weight_versions=np.array([-1] * PROMPT_TOKENS + sampled, np.int32),
        turns=(Turn(start=PROMPT_TOKENS, stop=total, finish_reason=FinishReason.STOP),) if sampled else (),
        temperature=1.0,
        reward=reward,
        finish_reason=FinishReason.STOP,
    )


def deliver(buffer: ReplayBuffer, leases: Lease | Sequence[Lease], *args: Any, **kwargs: Any) -> list[Receipt]:
    """Complete leases with `rollout(lease, *args, **kwargs)`."""
    return [
        buffer.complete(rollout(lease, *args, **kwargs))
        for lease in ([leases] if isinstance(leases, Lease) else leases)
    ]


def lease_all(buffer: ReplayBuffer, actor_id: str = "actor-0") -> list[Lease]:
    """Lease until the gate is shut."""
    leases: list[Lease] = []
    while more := buffer.lease(actor_id, 1000):
        leases += more
    return leases


def commit(buffer: ReplayBuffer, batch: Batch | None) -> int:
    """Finish a batch as committed; returns the new version."""
    assert batch is not None
    version = buffer.snapshot().version + 1
    buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(version))
    return version


def train_one(buffer: ReplayBuffer) -> Batch:
    """Take the next batch and commit it."""
    batch = buffer.take_batch()
    commit(buffer, batch)
    assert batch is not None
    return batch


def sample_ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [trajectory.sample_id for trajectory in batch.trajectories]


def dropped(buffer: ReplayBuffer) -> dict[str, int]:
    """Non-zero drop counts by reason."""
    return {DropReason(reason).value: count for reason, count in buffer.ledger().dropped.items() if count}


class CopyingStore:
    """Keeps copies of exactly what it is handed, as a store on disk does: a forgotten change shows after a restart."""

    def __init__(self) -> None:
        self.run: RunState | None = None
        self.samples: dict[SampleId, Sample] = {}
        self.units: dict[GroupId, Unit] = {}
        self.members: dict[GroupId, list[SampleId]] = {}
        self.batches: dict[BatchId, BatchRecord] = {}
        self.kept: dict[SampleId, Trajectory] = {}

    def load(self) -> StoredRun | None:
        if self.run is None:
            return None
        units = {
            unit_id: replace(unit, samples=[replace(self.samples[sample_id]) for sample_id in self.members[unit_id]])
            for unit_id, unit in self.units.items()
        }
        batches = {batch_id: replace(record) for batch_id, record in self.batches.items()}
        return StoredRun(run=copy.deepcopy(self.run), units=units, batches=batches)

    def write(self, changes: Changes) -> None:
        self.run = copy.deepcopy(changes.run)
        self.samples.update({sample_id: replace(sample) for sample_id, sample in changes.samples.items()})
        for unit_id, unit in changes.units.items():
            self.units[unit_id] = replace(unit, samples=[])
            self.members[unit_id] = [sample.sample_id for sample in unit.samples]
        self.batches.update({batch_id: replace(record) for batch_id, record in changes.batches.items()})
        self.kept.update(changes.payloads)
        for sample_id in changes.removed_payloads:
            del self.kept[sample_id]
        for unit_id in changes.removed_units:
            del self.units[unit_id]
            for sample_id in self.members.pop(unit_id):
                del self.samples[sample_id]
                self.kept.pop(sample_id, None)
        for batch_id in changes.removed_batches:
            del self.batches[batch_id]

    def payloads(self, sample_ids: Sequence[SampleId]) -> list[Trajectory]:
        return [self.kept[sample_id] for sample_id in sample_ids]
