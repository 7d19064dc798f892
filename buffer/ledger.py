"""Where every sample went.

    issued = queued + leased + assembling + ready + in_training + trained + dropped{reason, ...}

The ledger alone changes a sample's state. Its counts are part of the `RunState`, so they are stored with the samples.
"""

from __future__ import annotations

import math

from buffer.records import RunState, Sample, Totals
from common.types import DropReason, LedgerCounts, SampleState

_NEXT: dict[SampleState, tuple[SampleState, ...]] = {
    SampleState.QUEUED: (SampleState.LEASED, SampleState.DROPPED),
    SampleState.LEASED: (SampleState.QUEUED, SampleState.ASSEMBLING, SampleState.DROPPED),
    SampleState.ASSEMBLING: (SampleState.READY, SampleState.DROPPED),
    SampleState.READY: (SampleState.IN_TRAINING, SampleState.DROPPED),
    SampleState.IN_TRAINING: (SampleState.READY, SampleState.TRAINED, SampleState.DROPPED),
    SampleState.TRAINED: (SampleState.READY,),  # its batch is not in the restored weights
    SampleState.DROPPED: (SampleState.READY,),  # the same, of a batch without update
}


class Ledger:
    """Moves samples between states and counts them there."""

    def __init__(self, run: RunState) -> None:
        self._run = run

    def issue(self, sample: Sample) -> None:
        """A new sample, queued."""
        self._run.issued += 1
        self._run.counts[sample.state] += 1

    def move(self, sample: Sample, to: SampleState, reason: DropReason | None = None) -> None:
        """Change the state of a sample.

        Args:
            reason: given exactly when `to` is DROPPED.
        """
        assert to in _NEXT[sample.state], f"sample {sample.sample_id}: {sample.state} -> {to}"
        assert (reason is not None) == (to is SampleState.DROPPED)
        self._count(sample, -1)
        sample.state, sample.drop_reason = to, reason
        self._count(sample, +1)

    def count(self, state: SampleState) -> int:
        return self._run.counts[state]

    def counts(self) -> LedgerCounts:
        """The terms of the equation above."""
        counts = self._run.counts
        return LedgerCounts(
            issued=self._run.issued,
            queued=counts[SampleState.QUEUED],
            leased=counts[SampleState.LEASED],
            assembling=counts[SampleState.ASSEMBLING],
            ready=counts[SampleState.READY],
            in_training=counts[SampleState.IN_TRAINING],
            trained=counts[SampleState.TRAINED],
            dropped=dict(self._run.dropped),
        )

    def _count(self, sample: Sample, step: int) -> None:
        if sample.state is SampleState.DROPPED:
            assert sample.drop_reason is not None
            self._run.dropped[sample.drop_reason] += step
        else:
            self._run.counts[sample.state] += step


def add_to(totals: Totals, sample: Sample, *, staleness: int = 0, step: int = 1) -> None:
    """Count a sample's length and duration; `step` -1 takes it out again (the largest staleness stays)."""
    totals.count += step
    totals.tokens += step * sample.num_sampled
    totals.seconds += step * sample.duration_s
    totals.max_staleness = max(totals.max_staleness, staleness)
    totals.by_length[size_class(sample.num_sampled)] += step
    totals.by_duration[size_class(sample.duration_s)] += step


def size_class(value: float) -> int:
    """Smallest e >= 0 with value <= 2^e."""
    if value <= 1:
        return 0
    mantissa, exponent = math.frexp(value)  # value = mantissa * 2^exponent, 0.5 <= mantissa < 1
    return exponent - 1 if mantissa == 0.5 else exponent
