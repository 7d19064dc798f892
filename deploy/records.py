"""Lines of metrics.jsonl. Every name is explained in common/run_metrics.py."""

from __future__ import annotations

from actors.evaluation import EvaluationResult
from buffer.records import Totals
from buffer.status import BufferStatus
from common.types import DropReason
from deploy.run_dir import Record
from learner.steps import StepRecord


def update_record(step: StepRecord, status: BufferStatus | None, *, time_s: float) -> Record:
    """A batch, whatever became of it. The buffer's numbers are its latest, at most a few seconds old."""
    return {
        "kind": "update",
        "outcome": step.outcome.value,
        "update": step.completed_updates,
        "version": step.version,
        "time_s": time_s,
        **({"reason": step.reason} if step.reason else {}),
        **step.metrics,
        **(buffer_gauges(status) if status else {}),
    }


def evaluation_record(result: EvaluationResult, *, update: int, time_s: float) -> Record:
    """`update` is when it was asked for; the versions are those of the weights that generated."""
    return {
        "kind": "evaluation",
        "update": update,
        "time_s": time_s,
        "version_oldest": result.oldest_version,
        "version_newest": result.newest_version,
        "eval/reward_mean": result.reward_mean,
        "eval/count": result.count,
        "eval/unscorable": result.unscorable,
        "eval/length_mean": result.length_mean,
        "eval/truncated": result.truncated,
    }


def buffer_gauges(status: BufferStatus) -> dict[str, float]:
    """The ledger, and what happened on the way."""
    counts, events = status.counts, status.events
    states = ("issued", "queued", "leased", "assembling", "ready", "in_training", "trained")
    return {
        **{f"buffer/{state}": getattr(counts, state) for state in states},
        **{f"buffer/dropped_{reason.value}": counts.dropped.get(reason, 0) for reason in counts.dropped},
        "buffer/held_bytes": status.held_bytes,
        "buffer/length_bias": status.length_bias,
        "buffer/late_deliveries": events.late_deliveries,
        "buffer/duplicate_deliveries": events.duplicate_deliveries,
        "buffer/lost_leases": events.lost_leases,
        "buffer/expired_leases": events.expired_leases,
        "buffer/retries": events.retries,
        "buffer/returned_by_restore": events.returned_by_restore,
        "buffer/beyond_bound_prompts": len(status.beyond_bound),
        **_size_gauges("buffer/trained", status.trained),
        **_size_gauges("buffer/dropped_stale", status.dropped.get(DropReason.STALE, Totals())),
    }


def _size_gauges(name: str, totals: Totals) -> dict[str, float]:
    """How long, slow and stale the samples with one outcome were; nothing without any."""
    if not totals.count:
        return {}
    return {
        f"{name}_length_mean": totals.mean_tokens,
        f"{name}_duration_mean_s": totals.mean_seconds,
        f"{name}_staleness_max": totals.max_staleness,
    }
