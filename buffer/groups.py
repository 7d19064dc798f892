"""Group assembly: when a unit is whole, when it is lost, which members are late, and where it stands in the order.

A single rollout is a unit of one member under the same rules.
"""

from __future__ import annotations

from enum import StrEnum

from buffer.records import Sample, Stage, Unit
from buffer.settings import ReplaySettings
from common.types import DropReason, SampleState

OUTSTANDING = (SampleState.QUEUED, SampleState.LEASED)
USABLE = (SampleState.ASSEMBLING, SampleState.READY, SampleState.IN_TRAINING, SampleState.TRAINED)
EQUAL_REWARDS = 1e-6  # spread, relative to the largest reward, below which rewards carry no signal


class Verdict(StrEnum):
    """What becomes of a unit that is being assembled."""

    WAIT = "wait"
    WHOLE = "whole"
    TOO_FEW = "too_few"  # fewer than two members can still be had, so there is nothing to compare


def outstanding(unit: Unit) -> list[Sample]:
    """Members that are still to be delivered."""
    return [sample for sample in unit.samples if sample.state in OUTSTANDING]


def usable(unit: Unit) -> list[Sample]:
    """Members with a trajectory that is or was to be trained, in order."""
    return [sample for sample in unit.samples if sample.state in USABLE]


def in_finished_batch(sample: Sample) -> bool:
    """Whether a member of a unit whose batch is finished was in that batch; else it was dropped before."""
    return sample.state is SampleState.TRAINED or sample.drop_reason is DropReason.NO_UPDATE


def verdict(unit: Unit) -> Verdict:
    """Members that were dropped leave the unit to the others; a group needs two, unless it was converted."""
    num_usable, num_outstanding = len(usable(unit)), len(outstanding(unit))
    if num_usable + num_outstanding < (1 if unit.size == 1 or unit.converted else 2):
        return Verdict.TOO_FEW
    return Verdict.WAIT if num_outstanding else Verdict.WHOLE


def order(unit: Unit) -> tuple[int, int] | None:
    """(version at issue, lease number) of the oldest member under its current lease; None: no member has one."""
    leases = [
        (sample.version_at_issue, sample.lease_id)
        for sample in unit.samples
        if sample.lease_id is not None and (sample.state is SampleState.LEASED or sample.state in USABLE)
    ]
    return min(leases, default=None)


def late_members(unit: Unit, settings: ReplaySettings, now: float) -> list[Sample]:
    """Members the group has waited for too long, counted from its first delivery.

    retry: the leased members, each given `straggler_after_s` from the issue of its own lease too. close, convert: every
    outstanding member, once `close_at` others are there.
    """
    if unit.stage is not Stage.ASSEMBLING or unit.first_delivery_at is None:
        return []
    limit_s = settings.straggler_after_s
    if now < unit.first_delivery_at + limit_s:
        return []
    missing = outstanding(unit)
    if settings.straggler == "retry":
        return [s for s in missing if s.state is SampleState.LEASED and now >= s.issued_at + limit_s]
    assert settings.close_at is not None
    return missing if len(usable(unit)) >= settings.close_at else []


def late_at(unit: Unit, settings: ReplaySettings) -> float | None:
    """When `late_members` will find something by time alone; None: not before something else happens to the unit."""
    if unit.stage is not Stage.ASSEMBLING or unit.first_delivery_at is None:
        return None
    limit_s = settings.straggler_after_s
    if settings.straggler == "retry":
        leased = [s.issued_at for s in unit.samples if s.state is SampleState.LEASED]
        return max(unit.first_delivery_at, min(leased)) + limit_s if leased else None
    assert settings.close_at is not None
    return unit.first_delivery_at + limit_s if len(usable(unit)) >= settings.close_at else None


def uninformative(unit: Unit) -> bool:
    """Whether a group's rewards are all equal, so that comparing its members says nothing."""
    rewards = [sample.reward for sample in usable(unit)]
    return len(rewards) > 1 and max(rewards) - min(rewards) <= EQUAL_REWARDS * max(1.0, *map(abs, rewards))
