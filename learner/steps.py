"""What the learner tells the driver. Without torch, so that the driver needs none."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import BatchOutcome, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord:
    """What the learner starts from."""

    completed_updates: int
    version: WeightVersion
    checkpoint: str  # folder it was restored from; empty: the starting model
    num_parameters: int
    num_trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one batch did."""

    outcome: BatchOutcome
    completed_updates: int
    version: WeightVersion  # after the batch
    metrics: dict[str, float]  # names of common/run_metrics.py
    is_last: bool  # the data ended with this batch
    reason: str = ""  # why there was no update
    checkpoint: str = ""  # folder, when one was saved
