"""The report tells a run in numbers worked out by hand, for runs of any length, and needs no other file."""

from __future__ import annotations

import re
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from common.config import RunConfig
from common.config_load import validate
from common.errors import ResourceError
from deploy.history import tell
from deploy.report import RunSummary, Totals, summarise, write_report
from deploy.report_figure import make_figure, rates, smooth, time_unit
from deploy.run_dir import RunDir, new_run_dir


class End:
    """How a run ended, as the supervisor says it."""

    reason = "all updates done"
    completed_updates = 2
    restarts = 1


def update(number: int, time_s: float, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "update",
        "outcome": "committed",
        "update": number,
        "version": number,
        "time_s": time_s,
        "batch/reward_mean": reward,
        "batch/trajectories": 4,
        "batch/sampled_tokens": 20,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "policy/tokens": 20,
        "policy/masked_tokens": 1,
        "policy/rejected_tokens": 0,
        "time/wait_s": 1.0,
        "time/update_s": 2.0,
        "time/value_s": 0.5,
        "time/policy_s": 1.0,
        "time/publish_s": 1.0,
        **more,
    }


def evaluation(number: int, time_s: float, reward: float) -> dict[str, Any]:
    versions = {"version_oldest": number, "version_newest": number}
    return {"kind": "evaluation", "update": number, "time_s": time_s, "eval/reward_mean": reward, **versions}


def make_run(tmp_path: Path, records: list[dict[str, Any]]) -> RunDir:
    run_dir, _ = new_run_dir(validate({"run_dir": str(tmp_path / "run")}))
    for record in records:
        run_dir.record(record)
    return run_dir


class Page(HTMLParser):
    """Text of a page, and every address it would load something from."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.loads: list[str] = []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]


def test_totals_are_those_worked_out_by_hand() -> None:
    records = [
        update(0, 10.0, 0.1, outcome="value_warmup"),
        update(1, 20.0, 0.2),
        evaluation(0, 21.0, 0.25),
        update(2, 32.0, 0.6, **{"staleness/mean": 2.0, "staleness/max": 5, "time/wait_s": 3.0}),
        evaluation(2, 33.0, 0.75),
    ]
    totals = Totals.of(tell(records))
    assert (totals.completed_updates, totals.batches, totals.without_update, totals.undone) == (2, 3, 1, 0)
    assert (totals.trajectories, totals.sampled_tokens, totals.duration_s) == (12, 60, 33.0)
    assert (totals.reward_first, totals.reward_last) == (0.1, 0.6)
    assert (totals.held_out_before, totals.held_out_after) == (0.25, 0.75)
    assert (totals.staleness_mean, totals.staleness_max) == (1.0, 5)
    assert totals.waiting_share == pytest.approx((1 + 3) / (4 + 6))  # without the first batch


def test_first_and_last_reward_are_means_of_a_tenth() -> None:
    totals = Totals.of(tell([update(n, n, float(n)) for n in range(1, 21)]))
    assert (totals.reward_first, totals.reward_last) == (1.5, 19.5)


def test_run_without_data_has_no_numbers_and_no_error() -> None:
    totals = Totals.of(tell([]))
    assert (totals.completed_updates, totals.duration_s) == (0, 0.0)
    assert (totals.reward_first, totals.held_out_before, totals.staleness_max, totals.waiting_share) == (None,) * 4


@pytest.mark.parametrize(
    "records",
    [
        [],
        [update(1, 10.0, 0.2)],
        [update(0, 10.0, 0.2, outcome="no_update", **{"policy/tokens": 0, "policy/masked_tokens": None})],
        [evaluation(0, 5.0, 0.5)],
        [update(1, 10.0, 0.2), evaluation(1, 11.0, 0.5), update(2, 20.0, -3.0), {"kind": "event", "text": "x"}],
        [{"kind": "update", "update": 1}],
        [update(n, 7.0 * n, 0.5) for n in range(1, 101)],
    ],
    ids=["nothing", "one update", "no usable token", "evaluation only", "two updates", "bare record", "many"],
)
def test_report_of_a_run_of_any_length_is_whole_and_self_contained(
    tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    run_dir = make_run(tmp_path, records)
    path = write_report(run_dir.path)
    assert path == run_dir.path / "report.html"
    assert (run_dir.path / "report.png").read_bytes().startswith(b"\x89PNG")
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.loads) == 1
    assert page.loads[0].startswith("data:image/png;base64,")
    assert "completed updates" in page.text
    assert 'recipe = "sao"' in page.text


def test_report_shows_what_was_recorded_and_explains_it(tmp_path: Path) -> None:
    records = [
        update(1, 10.0, 0.25),
        evaluation(1, 12.0, 0.5),
        {"kind": "event", "time_s": 3.0, "text": "<b>died</b> & back"},
    ]
    text = Page(write_report(make_run(tmp_path, records).path).read_text(encoding="utf-8")).text
    assert "<b>died</b> & back" in text  # as text, not as markup
    assert "batch/reward_mean0.25Mean reward of a trajectory." in text
    assert "12 s" in text


def test_report_can_be_written_of_a_folder_without_config(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.record(update(1, 10.0, 0.25))
    assert "unknown recipe" in write_report(tmp_path).read_text(encoding="utf-8")


def test_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, [])
    (run_dir.path / "report.html").mkdir()
    with pytest.raises(ResourceError, match=r"report\.html cannot be written: Is a directory"):
        write_report(run_dir.path)


def test_summary_names_reward_report_and_replaced_services(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, [evaluation(0, 5.0, 0.25), update(1, 65.0, 0.5), update(2, 125.0, 0.75)])
    summary = summarise(run_dir.path, End(), run_dir.path / "report.html", stopped_by=None)  # type: ignore[arg-type]
    assert summary.exit_status == 0
    text = str(summary)
    assert "all updates done: 2 updates, 8 trajectories, 40 sampled tokens" in text
    assert "training took    2 min 05 s, from the start of the services" in text
    assert re.search(r"training reward +0\.500 → 0\.750", text)
    assert re.search(r"held-out reward +0\.250\n", text)
    assert "services replaced after a failure: 1" in text
    assert str(run_dir.path / "report.html") in text
    assert "resume" not in text


def test_summary_of_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    stopped = RunSummary(
        run_dir=tmp_path,
        report=tmp_path / "report.html",
        reason="stopped",
        restarts=0,
        totals=Totals.of(tell([])),
        stopped_by=signal.SIGTERM,
    )
    assert stopped.exit_status == 143
    assert "stopped by SIGTERM" in str(stopped)
    assert f"slipstream resume {tmp_path}" in str(stopped)


def test_moving_mean_keeps_the_length_and_shrinks_at_the_ends() -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]
    assert smooth([], 3) == []


def test_rate_is_amount_over_the_time_since_and_leaves_out_the_first_batch() -> None:
    records = [{"time_s": t, "time": t, "n": n} for t, n in ((100.0, 999), (102.0, 10), (104.0, 30), (114.0, 20))]
    times, per_second = rates(records, "n", window=2)
    assert times == [102.0, 104.0, 114.0]
    assert per_second == [5.0, 10.0, 50 / 12]


def test_no_curve_over_time_is_drawn_across_a_pause() -> None:
    first = [evaluation(0, 9.0, 0.1), *(update(n, 10.0 * n, 0.1 * n) for n in (1, 2, 3)), evaluation(3, 31.0, 0.3)]
    second = [update(4, 22.0, 0.4), update(5, 28.0, 0.5), evaluation(5, 29.0, 0.5)]  # 31 s have passed before
    figure = make_figure(tell(first + second), None)
    drawn = {axes.get_title(): [list(line.get_xdata()) for line in axes.lines] for axes in figure.axes}
    assert drawn["Reward over time"] == [[10.0, 20.0, 30.0], [53.0, 59.0], [9.0, 31.0], [60.0]]
    assert drawn["Throughput of training"] == [[20.0, 30.0], [59.0], []]  # the last one is for the legend
    assert drawn["Reward"] == [[1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 3.0, 5.0]]


def test_bound_is_below_the_legend_and_says_what_it_does() -> None:
    (axes,) = [a for a in make_figure(tell([update(1, 1.0, 0.1)]), RunConfig()).axes if "Staleness" in a.get_title()]
    assert axes.get_ylim()[1] >= 1.4 * RunConfig().staleness.bound
    assert "bound 4: older ones have no gradient" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_time_axis_is_in_a_unit_that_fits() -> None:
    assert [time_unit(s)[0] for s in (0, 299, 300, 10799, 10800)] == ["s", "s", "min", "min", "h"]
