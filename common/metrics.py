"""Every Prometheus series of a run, and the only module that names one.

Names: slipstream_<component>_<quantity>_<unit>. Labels take few, fixed values; never a prompt, sample or actor.

A counter counts what was done since the process started, work that a restore took back included, so it never goes
back. What may go back, because a sample changes its state or a restore takes updates back, is a gauge. A gauge without
a value yet is NaN, which dashboards leave blank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.run_metrics import STALENESS_BUCKETS
from common.types import BatchOutcome, DropReason, SampleState

PHASES = ("wait", "update", "publish")
TOKEN_KINDS = ("sampled", "given")
SERVICES = ("learner", "actor")
BUFFER_EVENTS = (
    "late_deliveries",
    "duplicate_deliveries",
    "lost_leases",
    "expired_leases",
    "retries",
    "returned_by_restore",
)


class BufferMetrics:
    """Where the samples are, and what happened to them on the way."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Maker(registry, "slipstream_buffer")
        states = [state for state in SampleState if state is not SampleState.DROPPED]
        self.issued = make.gauge("issued_samples", "Samples issued; the sum of samples and dropped samples.")
        self.samples = make.gauge("samples", "Samples that are not dropped, by where they are.", "state", states)
        self.dropped = make.gauge("dropped_samples", "Samples that left untrained, by reason.", "reason", DropReason)
        self.held = make.gauge("held_bytes", "Delivered trajectories that are held.")
        self.live = make.gauge("live_samples", "Samples under way, counted as the admission limit counts them.")
        self.admission_limit = make.gauge("admission_limit_samples", "Samples that may be under way at once.")
        self.length_bias = make.gauge(
            "length_bias_ratio", "Mean length of what was trained over that of what was delivered; below 1, long lose."
        )
        self.events = make.counter("events", "What happened to leases and deliveries.", "event", BUFFER_EVENTS)


class LearnerMetrics:
    """What the learner did. Trajectories and tokens are those of batches that were learned from."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Maker(registry, "slipstream_learner")
        self.batches = make.counter("batches", "Batches, by what became of them.", "outcome", BatchOutcome)
        self.trajectories = make.counter("trajectories", "Trajectories trained on.")
        self.tokens = make.counter(
            "tokens", "Their tokens: sampled by the policy, or given (prompts, observations).", "kind", TOKEN_KINDS
        )
        self.policy_tokens = make.counter("policy_tokens", "Sampled tokens that the policy loss counted.")
        self.masked_tokens = make.counter("masked_tokens", "Of these, no gradient: ratio outside the trust region.")
        self.rejected_tokens = make.counter("rejected_tokens", "Of these, no gradient: staler than the bound.")
        self.staleness = CountedHistogram(
            registry,
            "slipstream_learner_staleness_versions",
            "Staleness of sampled tokens when they were trained on.",
            [math.inf if highest is None else highest for _, highest in STALENESS_BUCKETS],
        )
        self.seconds = make.counter("time_seconds", "Waiting for batches, updating, publishing.", "phase", PHASES)
        self.reward = make.gauge("batch_reward", "Mean reward of the newest batch.")
        self.updates = make.gauge("completed_updates", "Updates in the weights; goes back with a restore.")
        self.version = make.gauge("weight_version", "Label of the learner's weights.")


class DriverMetrics:
    """What the driver sees: actors, restarts and evaluations."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Maker(registry, "slipstream_driver")
        self.running = make.gauge("running_actors", "Rollout actors whose engine is up.")
        self.restarts = make.counter("service_restarts", "Services that died and are replaced.", "service", SERVICES)
        make = Maker(registry, "slipstream_evaluation")
        self.evaluation_reward = make.gauge("reward", "Mean reward over held-out prompts in the newest evaluation.")
        self.evaluation_version = make.gauge("weight_version", "Newest weight version that generated for it.")


@dataclass(frozen=True)
class Maker:
    """Makes the series of one component. Series of every label value are there from the start."""

    registry: CollectorRegistry
    component: str

    def counter(self, name: str, documentation: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        counter = Counter(f"{self.component}_{name}", documentation, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(str(value))
        return counter

    def gauge(self, name: str, documentation: str, label: str = "", values: Iterable[str] = ()) -> Gauge:
        gauge = Gauge(f"{self.component}_{name}", documentation, [label] if label else [], registry=self.registry)
        for child in [gauge.labels(str(value)) for value in values] or [gauge]:
            child.set(math.nan)
        return gauge


class CountedHistogram(Collector):
    """A histogram that is fed with counts of buckets: prometheus_client's own takes one observation a call.

    Args:
        bounds: upper bounds, included, rising; the last is infinite.
    """

    def __init__(self, registry: CollectorRegistry, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0.0] * len(bounds)
        self._sum = 0.0
        self._lock = threading.Lock()
        registry.register(self)

    def add(self, counts: Sequence[float], total: float) -> None:
        """Observations of each bucket, and the sum of the observed values."""
        with self._lock:
            self._counts = [before + count for before, count in zip(self._counts, counts, strict=True)]
            self._sum += total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        with self._lock:
            counts, total = self._counts, self._sum
        buckets, cumulative = [], 0.0
        for bound, count in zip(self._bounds, counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if math.isinf(bound) else f"{bound:.1f}", cumulative))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=total)


class Followed:
    """A counter that follows totals kept elsewhere; a total that falls, because its keeper started anew, adds nothing.

    Args:
        counter: with one label, the name of the total.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[str, float] = {}

    def update(self, totals: Mapping[str, float]) -> None:
        for name, total in totals.items():
            self._counter.labels(name).inc(max(0.0, total - self._last.get(name, 0.0)))
            self._last[name] = total
