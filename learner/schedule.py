"""Step size as a function of completed updates alone: a stop, a restore or a skipped batch changes nothing."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    completed_updates: int, *, peak: float, schedule: Schedule, warmup_updates: int, total_updates: int
) -> float:
    """Step size of the update that follows `completed_updates` others.

    Rises in equal steps to `peak` at update number `warmup_updates` (the first is peak / warmup_updates, above 0), then
    decays so that it would reach 0 at update `total_updates + 1`; the last one is still above 0.

    Args:
        peak: > 0.
        warmup_updates, total_updates: >= 0; a warm-up as long as the whole run is allowed.
    """
    if completed_updates < warmup_updates:
        return peak * (completed_updates + 1) / warmup_updates
    if schedule == "constant":
        return peak
    progress = min(1.0, (completed_updates - warmup_updates) / max(1, total_updates - warmup_updates))
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
