"""Report of a run: one HTML file that needs nothing else, and its picture beside it."""

from __future__ import annotations

import base64
import html
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import RunConfig
from common.config_load import dump_config
from common.errors import ConfigError, ResourceError
from common.run_metrics import METRICS
from deploy.format import arrow, duration, number, plural
from deploy.history import History, read_history, series
from deploy.run_dir import Record, RunDir

if TYPE_CHECKING:
    from deploy.supervise import RunEnd

SHOWN_EVENTS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """A run in numbers; none where there is no data."""

    completed_updates: int
    batches: int
    without_update: int  # batches that were trained on without moving the policy, or not at all
    undone: int  # batches that a restore took back
    starts: int
    duration_s: float
    trajectories: int
    sampled_tokens: int
    reward_first: float | None  # mean over the first tenth of the batches
    reward_last: float | None  # over the last tenth
    held_out_before: float | None
    held_out_after: float | None
    staleness_mean: float | None
    staleness_max: int | None
    waiting_share: float | None  # of the learner's time, spent waiting for batches; the first batch left out

    @classmethod
    def of(cls, history: History) -> Totals:
        updates = history.updates
        rewards = series(updates, "update", "batch/reward_mean")[1]
        held_out = series(history.evaluations, "update", "eval/reward_mean")[1]
        tenth = max(1, len(rewards) // 10)
        staleness = series(updates, "staleness/max", "staleness/mean")
        committed = sum(record.get("outcome", "committed") == "committed" for record in updates)
        return cls(
            completed_updates=history.completed_updates,
            batches=len(updates),
            without_update=len(updates) - committed,
            undone=history.undone,
            starts=history.starts,
            duration_s=history.duration_s,
            trajectories=int(_sum(updates, "batch/trajectories")),
            sampled_tokens=int(_sum(updates, "batch/sampled_tokens")),
            reward_first=_mean(rewards[:tenth]),
            reward_last=_mean(rewards[-tenth:]),
            held_out_before=held_out[0] if held_out else None,
            held_out_after=held_out[-1] if len(held_out) > 1 else None,
            staleness_mean=_mean(staleness[1]),
            staleness_max=int(max(staleness[0])) if staleness[0] else None,
            waiting_share=_waiting_share(updates[1:]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """How a run ended, for the command line."""

    run_dir: Path
    report: Path
    reason: str  # "all updates done", "end of data" or "stopped"
    restarts: int  # services that were replaced
    totals: Totals
    stopped_by: signal.Signals | None = None

    @property
    def exit_status(self) -> int:
        """0, or 128 + the signal that stopped the run early."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    def __str__(self) -> str:
        totals = self.totals
        stopped = f" by {self.stopped_by.name}" if self.stopped_by else ""
        lines = [
            f"{self.reason}{stopped}: {plural(totals.completed_updates, 'update')}, "
            f"{totals.trajectories:,} trajectories, {totals.sampled_tokens:,} sampled tokens",
            f"training took    {duration(totals.duration_s)}, from the start of the services",
            f"training reward  {arrow(totals.reward_first, totals.reward_last)}",
            f"held-out reward  {arrow(totals.held_out_before, totals.held_out_after)}",
            f"report           {self.report}",
        ]
        if self.restarts:
            lines.insert(1, f"services replaced after a failure: {self.restarts}")
        if self.stopped_by:
            lines.append(f"to go on         slipstream resume {self.run_dir}")
        return "\n".join(lines)


def summarise(run_dir: Path, end: RunEnd, report: Path, *, stopped_by: signal.Signals | None) -> RunSummary:
    """What the command line says at the end of a run."""
    totals = Totals.of(read_history(run_dir))
    return RunSummary(
        run_dir=run_dir, report=report, reason=end.reason, restarts=end.restarts, totals=totals, stopped_by=stopped_by
    )


def write_report(run_dir: Path) -> Path:
    """Write report.html and report.png from what is recorded so far, and return the path of the first.

    Raises:
        ResourceError: the files cannot be written.
    """
    from deploy.report_figure import draw  # matplotlib takes a third of a second to import

    history = read_history(run_dir)
    try:
        config = RunDir(run_dir).config()
    except ConfigError:  # a folder without config, or of another version: the curves are still worth a look
        config = None
    picture, page = run_dir / "report.png", run_dir / "report.html"
    try:
        draw(history, config, picture)
        page.write_text(_page(run_dir, history, config, picture.read_bytes()), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"report {page} cannot be written: {error.strerror}") from None
    return page


# The page

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2.2rem }
.quiet { color: #718096 } img { width: 100%; height: auto }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.2rem 0 }
.card { border: 1px solid #e2e8f0; border-radius: 8px; padding: .6rem 1rem; min-width: 8.5rem }
.card b { display: block; font-size: 1.3rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top }
tr { border-bottom: 1px solid #edf2f7 } td.n { font-variant-numeric: tabular-nums; white-space: nowrap }
pre { background: #f7fafc; padding: 1rem; overflow-x: auto; font-size: 13px } code { font-size: 13px }
"""


def _page(run_dir: Path, history: History, config: RunConfig | None, picture: bytes) -> str:
    totals = Totals.of(history)
    recipe = config.recipe if config else "unknown recipe"
    written = time.strftime("%Y-%m-%d %H:%M")
    image = base64.b64encode(picture).decode()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(run_dir.name)} · Slipstream</title><style>{STYLE}</style></head><body>",
            f"<h1>{_text(run_dir.name)}</h1>",
            f'<p class="quiet">{_text(recipe)} · {_text(_model(config))} · written {written}</p>',
            _cards(totals),
            f'<img alt="Reward, staleness, throughput, masked tokens, time" src="data:image/png;base64,{image}">',
            _evaluations(history.evaluations),
            _last_batch(history.updates),
            _events(history.events),
            _config(config),
            "</body></html>",
        ]
    )


def _cards(totals: Totals) -> str:
    cards = [
        ("completed updates", f"{totals.completed_updates:,}"),
        ("from the start of the services", duration(totals.duration_s)),
        ("training reward", arrow(totals.reward_first, totals.reward_last)),
        ("held-out reward", arrow(totals.held_out_before, totals.held_out_after)),
        ("trajectories trained on", f"{totals.trajectories:,}"),
        ("tokens sampled", f"{totals.sampled_tokens:,}"),
        ("mean staleness", number(totals.staleness_mean)),
        ("largest staleness", number(totals.staleness_max)),
        ("learner waiting", "–" if totals.waiting_share is None else f"{totals.waiting_share:.0%}"),
    ]
    optional = [
        ("batches without policy update", totals.without_update),
        ("batches undone by a restore", totals.undone),
        ("times resumed", totals.starts - 1),
    ]
    cards += [(name, f"{count:,}") for name, count in optional if count]
    inner = "".join(f'<div class="card"><b>{_text(value)}</b>{_text(name)}</div>' for name, value in cards)
    return f'<div class="cards">{inner}</div>'


def _evaluations(records: Sequence[Record]) -> str:
    rows = [
        (
            record.get("update"),
            _versions(record),
            record.get("eval/reward_mean"),
            record.get("eval/count"),
            record.get("eval/length_mean"),
            duration(record["time_s"]),
        )
        for record in records
    ]
    heads = ("updates", "weight version", "mean reward", "prompts", "mean length", "after")
    return _table("Held-out prompts", heads, rows, "No evaluation was made.")


def _versions(record: Record) -> str:
    oldest, newest = record.get("version_oldest"), record.get("version_newest")
    return number(oldest) if oldest == newest else f"{number(oldest)} to {number(newest)}"


def _last_batch(updates: Sequence[Record]) -> str:
    last = updates[-1] if updates else {}
    rows = [(name, value, METRICS.get(name, "")) for name, value in sorted(last.items()) if "/" in name]
    return _table("Last batch, every number", ("name", "value", "meaning"), rows, "No batch was trained on.")


def _events(events: Sequence[Record]) -> str:
    rows = [(duration(record["time_s"]), record.get("text", "")) for record in events[-SHOWN_EVENTS:]]
    return _table("Events", ("after", "what"), rows, "Nothing happened.")


def _config(config: RunConfig | None) -> str:
    if config is None:
        return ""
    toml = _text(dump_config(config))
    return f"<h2>Configuration</h2><details><summary>config.toml</summary><pre>{toml}</pre></details>"


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> str:
    body = "".join(
        "<tr>"
        + "".join(f'<td class="n">{_text(number(c))}</td>' if _is_number(c) else f"<td>{_text(c)}</td>" for c in row)
        + "</tr>"
        for row in rows
    )
    if not body:
        return f'<h2>{_text(title)}</h2><p class="quiet">{_text(empty)}</p>'
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return f"<h2>{_text(title)}</h2><table><tr>{head}</tr>{body}</table>"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _model(config: RunConfig | None) -> str:
    return config.model.path if config else ""


def _text(value: object) -> str:
    return html.escape(str(value))


def _sum(records: Iterable[Record], name: str) -> float:
    return sum(value for record in records if isinstance(value := record.get(name), (int, float)))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _waiting_share(updates: Sequence[Record]) -> float | None:
    waited = _sum(updates, "time/wait_s")
    total = waited + _sum(updates, "time/update_s") + _sum(updates, "time/publish_s")
    return waited / total if total else None
