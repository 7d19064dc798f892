"""F-33: what Prometheus is shown of a run, and that metrics never end one."""

from __future__ import annotations

import math
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from buffer.records import Events
from common.config import MetricsConfig
from common.metrics import BufferMetrics, DriverMetrics, LearnerMetrics
from common.types import DropReason, LedgerCounts, SampleState
from deploy.exporter import PORTS_TRIED, Exporter
from tests.run_kit import SMALL, Run, records
from tests.test_progress import make_status

Scrape = dict[tuple[str, str], float]  # name and the one label's value, or nothing


@pytest.fixture
def make() -> Iterator[Callable[..., Exporter]]:
    made: list[Exporter] = []

    def make_exporter(**settings: Any) -> Exporter:
        made.append(Exporter(MetricsConfig(**{"port": 0, **settings})))
        return made[-1]

    yield make_exporter
    for exporter in made:
        exporter.close()


def scrape(port: int | None) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            assert len(key) <= 2
            name, label = (*key, "")[:2]
            assert (name, label) not in samples
            samples[name, label] = sample.value
    return samples


def taken_port() -> socket.socket:
    """A listener on a port that has at least one more above it."""
    while True:
        listener = socket.create_server(("127.0.0.1", 0))
        if listener.getsockname()[1] < 65535:
            return listener
        listener.close()


def batch(**changes: Any) -> dict[str, Any]:
    return {
        "outcome": "committed",
        "update": 7,
        "version": 9,
        "batch/reward_mean": 0.25,
        "batch/trajectories": 4.0,
        "batch/tokens": 30.0,
        "batch/sampled_tokens": 20.0,
        "policy/tokens": 20.0,
        "policy/masked_tokens": 3.0,
        "policy/rejected_tokens": 2.0,
        "staleness/mean": 1.5,
        "staleness/tokens_0": 10.0,
        "staleness/tokens_1": 4.0,
        "staleness/tokens_5_to_8": 5.0,
        "staleness/tokens_from_9": 1.0,
        "time/wait_s": 0.5,
        "time/update_s": 1.25,
        "time/publish_s": 0.125,
        **changes,
    }


# What is shown


def test_batch_is_shown_with_all_its_numbers(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    exporter.update(batch())
    exporter.update(batch(update=8, version=10))
    shown = scrape(exporter.port)
    wanted = {
        ("batches_total", "committed"): 2,
        ("batches_total", "no_update"): 0,
        ("trajectories_total", ""): 8,
        ("tokens_total", "sampled"): 40,
        ("tokens_total", "given"): 20,
        ("policy_tokens_total", ""): 40,
        ("masked_tokens_total", ""): 6,
        ("rejected_tokens_total", ""): 4,
        ("time_seconds_total", "wait"): 1,
        ("time_seconds_total", "update"): 2.5,
        ("time_seconds_total", "publish"): 0.25,
        ("batch_reward", ""): 0.25,
        ("completed_updates", ""): 8,
        ("weight_version", ""): 10,
        ("staleness_versions_bucket", "0.0"): 20,
        ("staleness_versions_bucket", "1.0"): 28,
        ("staleness_versions_bucket", "4.0"): 28,
        ("staleness_versions_bucket", "8.0"): 38,
        ("staleness_versions_bucket", "+Inf"): 40,
        ("staleness_versions_count", ""): 40,
        ("staleness_versions_sum", ""): 60,  # 1.5 of 40 tokens
    }
    assert {key: shown[f"slipstream_learner_{key[0]}", key[1]] for key in wanted} == wanted


def test_batch_without_update_adds_its_time_and_no_tokens(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    exporter.update(batch(outcome="no_update"))
    shown = scrape(exporter.port)
    assert shown["slipstream_learner_batches_total", "no_update"] == 1
    assert shown["slipstream_learner_time_seconds_total", "update"] == 1.25
    assert shown["slipstream_learner_tokens_total", "sampled"] == 0
    assert shown["slipstream_learner_staleness_versions_count", ""] == 0


def test_ledger_is_shown_whole(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    exporter.status(make_status(), running=("actor-0", "actor-1"))
    shown = scrape(exporter.port)
    states = {label: value for (name, label), value in shown.items() if name == "slipstream_buffer_samples"}
    dropped = {label: value for (name, label), value in shown.items() if name == "slipstream_buffer_dropped_samples"}
    assert states == {"queued": 1, "leased": 60, "assembling": 2, "ready": 10, "in_training": 64, "trained": 1860}
    assert dropped == {reason.value: 3 if reason is DropReason.STALE else 0 for reason in DropReason}
    assert sum(states.values()) + sum(dropped.values()) == shown["slipstream_buffer_issued_samples", ""] == 2000
    assert shown["slipstream_driver_running_actors", ""] == 2
    exporter.status(make_status(), running=("actor-1",))  # the other one died
    assert scrape(exporter.port)["slipstream_driver_running_actors", ""] == 1


def test_evaluation_without_a_scored_prompt_shows_no_reward(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    exporter.evaluation({"eval/reward_mean": 0.75, "version_newest": 4})
    shown = scrape(exporter.port)
    assert shown["slipstream_evaluation_reward", ""] == 0.75
    assert shown["slipstream_evaluation_weight_version", ""] == 4
    exporter.evaluation({"eval/reward_mean": None, "version_newest": -1})
    assert math.isnan(scrape(exporter.port)["slipstream_evaluation_reward", ""])


def test_before_the_first_batch_gauges_are_blank_and_counters_are_zero(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    shown = {key: value for key, value in scrape(exporter.port).items() if not key[0].endswith("_created")}
    counters = [name for name, _ in shown if re.search(r"_(total|bucket|sum|count)$", name)]
    assert len(set(counters)) == 12
    assert all(value == 0 if name in counters else math.isnan(value) for (name, _), value in shown.items())


# Counters do not go back


def test_restore_takes_gauges_back_and_no_counter(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    exporter.update(batch(update=7, version=9))
    exporter.status(make_status(events=Events(lost_leases=5, retries=2)), running=())
    before = scrape(exporter.port)

    exporter.restarted("learner")
    exporter.update(batch(update=4, version=10, **{"policy/tokens": math.nan, "time/wait_s": -1.0}))
    counts = LedgerCounts(
        issued=20, queued=0, leased=0, assembling=0, ready=0, in_training=0, trained=20, dropped={}
    )  # of a buffer that started anew from the checkpoint, and counts its events from there
    exporter.status(make_status(counts=counts, events=Events(lost_leases=1)), running=())
    exporter.status(make_status(counts=counts, events=Events(lost_leases=4)), running=())
    after = scrape(exporter.port)

    fallen = {name for (name, label), value in before.items() if after[name, label] < value}
    assert fallen == {
        "slipstream_learner_completed_updates",
        "slipstream_buffer_issued_samples",
        "slipstream_buffer_samples",
        "slipstream_buffer_dropped_samples",
    }
    assert after["slipstream_buffer_events_total", "lost_leases"] == 8  # 5, then from 1 to 4
    assert after["slipstream_buffer_events_total", "retries"] == 2
    assert after["slipstream_learner_trajectories_total", ""] == 8
    assert after["slipstream_learner_policy_tokens_total", ""] == 20  # a number that is not finite adds nothing
    assert after["slipstream_driver_service_restarts_total", "learner"] == 1


def test_restarts_are_counted_by_kind_of_service(make: Callable[..., Exporter]) -> None:
    exporter = make()
    exporter.start()
    for name in ("actor-0", "actor-17", "learner"):
        exporter.restarted(name)
    shown = scrape(exporter.port)
    restarts = {label: value for (name, label), value in shown.items() if name.endswith("restarts_total")}
    assert restarts == {"actor": 2, "learner": 1}


# The port


def test_taken_port_means_the_next_free_one_and_is_said(make: Callable[..., Exporter]) -> None:
    with taken_port() as listener:
        taken = listener.getsockname()[1]
        exporter = make(port=taken)
        said = exporter.start()
        assert exporter.port is not None
        assert taken < exporter.port <= taken + PORTS_TRIED
        assert said == f"metrics at http://127.0.0.1:{exporter.port}/metrics (metrics.port = {taken} is taken)"
        assert ("slipstream_learner_trajectories_total", "") in scrape(exporter.port)


def test_last_port_taken_means_any(make: Callable[..., Exporter]) -> None:
    first, second = make(port=65535), make(port=65535)
    first.start()
    second.start()
    assert None not in (first.port, second.port)
    assert first.port != second.port


def test_two_exporters_serve_their_own_numbers(make: Callable[..., Exporter]) -> None:
    with taken_port() as listener:
        wanted = listener.getsockname()[1]
    first, second = make(port=wanted), make(port=wanted)
    first.start()
    second.start()
    first.update(batch())
    assert scrape(first.port)["slipstream_learner_trajectories_total", ""] == 4
    assert scrape(second.port)["slipstream_learner_trajectories_total", ""] == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b", "x" * 64])
def test_host_that_cannot_be_listened_on_is_said_and_not_fatal(make: Callable[..., Exporter], host: str) -> None:
    exporter = make(host=host, port=9464)
    assert exporter.start().startswith(f"metrics are not served: {host}:9464: ")
    assert exporter.port is None
    exporter.update(batch())
    exporter.close()


def test_metrics_can_be_switched_off(make: Callable[..., Exporter]) -> None:
    exporter = make(port=None)
    assert exporter.start() == "metrics are not served (metrics.port = none)"
    assert exporter.port is None


def test_port_is_free_again_after_close(make: Callable[..., Exporter]) -> None:
    first = make()
    first.start()
    port = first.port
    scrape(port)
    first.close()
    second = make(port=port)
    second.start()
    assert second.port == port


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    assert MetricsConfig().host == "127.0.0.1"


# Names


def families() -> dict[str, str]:
    """Name and type of every family."""
    registry = CollectorRegistry()
    for metrics in (BufferMetrics, LearnerMetrics, DriverMetrics):
        metrics(registry)
    return {family.name: family.type for family in registry.collect()}


def test_every_series_is_documented_and_nothing_else() -> None:
    text = (Path(__file__).parent.parent / "docs" / "prometheus.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(slipstream_\w+)` \| (\w+) \|", text, re.MULTILINE)
    shown = [(name + "_total" if kind == "counter" else name, kind) for name, kind in families().items()]
    assert sorted(documented) == sorted(shown)


def test_names_begin_with_product_and_component() -> None:
    assert all(re.fullmatch(r"slipstream_(buffer|learner|driver|evaluation)_[a-z_]+", name) for name in families())


def test_every_state_but_dropped_has_a_series() -> None:
    registry = CollectorRegistry()
    BufferMetrics(registry)
    (family,) = [family for family in registry.collect() if family.name == "slipstream_buffer_samples"]
    states = [sample.labels["state"] for sample in family.samples]
    assert states == [state.value for state in SampleState if state is not SampleState.DROPPED]


# A whole run


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_run_whose_port_is_taken_trains_and_says_where_its_metrics_are(tmp_path: Path) -> None:
    with taken_port() as listener:
        taken = listener.getsockname()[1]
        overrides = (f"metrics.port={taken}", f"run_dir={tmp_path / 'run'}", "max_updates=6")
        run = Run("train", *SMALL, *overrides)
        seen: list[Scrape] = []

        def all_numbers_shown() -> bool:
            said = next((r["text"] for r in records(tmp_path / "run", "event") if "metrics at" in r["text"]), None)
            if said is None:
                return False
            assert f"metrics.port = {taken} is taken" in said
            seen.append(scrape(int(said.partition("127.0.0.1:")[2].partition("/")[0])))
            return (
                seen[-1]["slipstream_learner_batches_total", "committed"] > 0
                and seen[-1]["slipstream_buffer_samples", "trained"] > 0
                and seen[-1]["slipstream_evaluation_reward", ""] >= 0
            )

        run.wait_for(all_numbers_shown)
        status, output = run.finish()
    assert status == 0, output
    assert "metrics at http://127.0.0.1:" in output
