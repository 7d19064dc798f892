"""Serves what the driver knows of a run to Prometheus. Nothing here ever ends a run."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from buffer.status import BufferStatus
from common.config import MetricsConfig
from common.metrics import BUFFER_EVENTS, PHASES, BufferMetrics, DriverMetrics, Followed, LearnerMetrics
from common.run_metrics import STALENESS_BUCKETS, staleness_bucket_name
from common.types import BatchOutcome, DropReason, SampleState

Record = Mapping[str, Any]

PORTS_TRIED = 100  # after the wanted one; then any


class Exporter:
    """The Prometheus endpoint of one run. Fed by one thread, scraped by others.

    `start` → `update`, `evaluation`, `status`, `restarted` as things happen → `close`.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self._config = config
        self._registry = CollectorRegistry()
        self._buffer = BufferMetrics(self._registry)
        self._learner = LearnerMetrics(self._registry)
        self._driver = DriverMetrics(self._registry)
        self._events = Followed(self._buffer.events)
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def start(self) -> str:
        """Start to serve; returns what to tell the user: the address, or why there is none."""
        host, wanted = self._config.host, self._config.port
        if wanted is None:
            return "metrics are not served (metrics.port = none)"
        last = min(wanted + PORTS_TRIED, 65535)
        for port in [0] if wanted == 0 else [*range(wanted, last + 1), 0]:
            try:
                self._server = start_http_server(port, host, self._registry)
                break
            except (OSError, UnicodeError) as error:  # UnicodeError: of a host that cannot be a name
                if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
                    return f"metrics are not served: {host}:{port}: {error}; set metrics.host and metrics.port"
        if self._server is None:
            return f"metrics are not served: no port of {host} is free; set metrics.host and metrics.port"
        taken = f" (metrics.port = {wanted} is taken)" if wanted not in (0, self.port) else ""
        address = f"[{host}]" if ":" in host else host
        return f"metrics at http://{address}:{self.port}/metrics{taken}"

    @property
    def port(self) -> int | None:
        """Where it listens; none when it does not."""
        return self._server[0].server_port if self._server else None

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def update(self, record: Record) -> None:
        """A batch; `record` is a line of metrics.jsonl."""
        learner, outcome = self._learner, record["outcome"]
        learner.batches.labels(outcome).inc()
        for phase in PHASES:
            _add(learner.seconds.labels(phase), record, f"time/{phase}_s")
        learner.updates.set(record["update"])
        learner.version.set(record["version"])
        if outcome == BatchOutcome.NO_UPDATE:
            return
        _set(learner.reward, record, "batch/reward_mean")
        _add(learner.trajectories, record, "batch/trajectories")
        sampled = _finite(record, "batch/sampled_tokens") or 0.0
        learner.tokens.labels("sampled").inc(sampled)
        learner.tokens.labels("given").inc(max(0.0, (_finite(record, "batch/tokens") or 0.0) - sampled))
        _add(learner.policy_tokens, record, "policy/tokens")
        _add(learner.masked_tokens, record, "policy/masked_tokens")
        _add(learner.rejected_tokens, record, "policy/rejected_tokens")
        counts = [_finite(record, staleness_bucket_name(*bucket)) or 0.0 for bucket in STALENESS_BUCKETS]
        learner.staleness.add(counts, (_finite(record, "staleness/mean") or 0.0) * sum(counts))

    def evaluation(self, record: Record) -> None:
        """An evaluation; `record` is a line of metrics.jsonl."""
        _set(self._driver.evaluation_reward, record, "eval/reward_mean")
        _set(self._driver.evaluation_version, record, "version_newest")

    def status(self, status: BufferStatus, running: Sequence[str]) -> None:
        """State of the buffer, and the actors whose engine is up."""
        buffer, counts = self._buffer, status.counts
        buffer.issued.set(counts.issued)
        for state in (state for state in SampleState if state is not SampleState.DROPPED):
            buffer.samples.labels(state.value).set(getattr(counts, state.value))
        for reason in DropReason:
            buffer.dropped.labels(reason.value).set(counts.dropped.get(reason, 0))
        buffer.held.set(status.held_bytes)
        buffer.admission_limit.set(status.admission_limit)
        buffer.live.set(status.live_samples)
        buffer.length_bias.set(status.length_bias)
        self._events.update({event: getattr(status.events, event) for event in BUFFER_EVENTS})
        self._driver.running.set(len(running))

    def restarted(self, name: str) -> None:
        """A service died and will be replaced."""
        self._driver.restarts.labels("learner" if name == "learner" else "actor").inc()


def _finite(record: Record, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _set(gauge: Gauge, record: Record, name: str) -> None:
    value = _finite(record, name)
    gauge.set(math.nan if value is None else value)


def _add(counter: Counter, record: Record, name: str) -> None:
    counter.inc(max(0.0, _finite(record, name) or 0.0))
