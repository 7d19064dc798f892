"""The report's picture: six curves of a run, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from common.config import RunConfig
from deploy.history import History, by_start, series
from deploy.run_dir import Record

Axes = Any  # matplotlib is read without types

BLUE, ORANGE, GREEN, RED, GREY, PURPLE = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#a0aec0", "#6b46c1"


def draw(history: History, config: RunConfig | None, path: Path) -> None:
    """Write the picture as PNG."""
    make_figure(history, config).savefig(path, format="png")


def make_figure(history: History, config: RunConfig | None) -> Figure:
    """The picture, six panels. One without data says so."""
    layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1)
    figure = Figure(figsize=(13, 11.5), dpi=110, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 2).ravel()
    unit, scale = time_unit(history.duration_s)
    for record in (*history.updates, *history.evaluations):
        record["time"] = record["time_s"] / scale
    _learning(axes[0], history, "update", "completed updates")
    _learning(axes[1], history, "time", f"time ({unit})")
    _staleness(axes[2], history, config)
    _throughput(axes[3], history, unit)
    _left_out(axes[4], history)
    _phases(axes[5], history)
    for panel in axes:
        _dress(panel)
    return figure


def time_unit(duration_s: float) -> tuple[str, float]:
    """Name and seconds of a unit in which a run is some tens or hundreds long."""
    if duration_s < 300:
        return "s", 1.0
    return ("min", 60.0) if duration_s < 3 * 3600 else ("h", 3600.0)


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of each value and its neighbours, `window` in all; fewer at the ends, so that the length stays."""
    before = (window - 1) // 2
    spans = ((max(0, i - before), i - before + window) for i in range(len(values)))
    return [float(np.mean(values[start:stop])) for start, stop in spans]


def window_of(count: int) -> int:
    return max(1, min(25, count // 12))


def rates(updates: list[Record], amount: str, window: int) -> tuple[list[float], list[float]]:
    """Time and amount per second, over the last `window` gaps between batches of one start of the run. Its first batch
    only starts the clock: that one's time holds the start of the services."""
    kept = [record for record in updates if isinstance(record.get(amount), (int, float))]
    times, per_second = [], []
    for index in range(1, len(kept)):
        first = max(0, index - window)
        passed = kept[index]["time_s"] - kept[first]["time_s"]
        if passed > 0:
            times.append(kept[index]["time"])
            per_second.append(sum(record[amount] for record in kept[first + 1 : index + 1]) / passed)
    return times, per_second


def _learning(axes: Axes, history: History, x: str, label: str) -> None:
    axes.set_title("Reward" if x == "update" else "Reward over time")
    axes.set_xlabel(label)
    moved = [record for record in history.updates if record.get("outcome", "committed") == "committed"]
    # before the first update, batches of the value function's warm-up would all stand at 0
    both: list[float] = []
    window = window_of(len(history.updates))
    for index, part in enumerate([moved] if x == "update" else by_start(history.updates)):
        at, rewards = series(part, x, "batch/reward_mean")
        _smoothed(axes, at, rewards, BLUE, "" if index else "training batches", window)
        both += rewards
    for index, part in enumerate([history.evaluations] if x == "update" else by_start(history.evaluations)):
        held_out = series(part, x, "eval/reward_mean")
        _line(axes, *held_out, ORANGE, "" if index else "held-out prompts", marker="o")
        both += held_out[1]
    if both and min(both) >= 0 and max(both) <= 1:  # the same scale for every run whose rewards are shares
        axes.set_ylim(-0.02, 1.04)


def _staleness(axes: Axes, history: History, config: RunConfig | None) -> None:
    axes.set_title("Staleness of the sampled tokens, in weight versions")
    axes.set_xlabel("completed updates")
    at, largest = series(history.updates, "update", "staleness/max")
    _line(axes, at, largest, GREY, "oldest token of a batch", width=1.0)
    at, mean = series(history.updates, "update", "staleness/mean")
    _smoothed(axes, at, mean, BLUE, "mean")
    if not at:
        return
    top = max([1.0, *largest])
    if config is not None:
        bound = config.staleness.bound
        what = ": older ones have no gradient" if bound and config.staleness.on_exceeded == "mask" else ""
        axes.axhline(bound, color=RED, linestyle="--", linewidth=1.2, label=f"bound {bound}{what}")
        top = max(top, bound)
    axes.set_ylim(-0.1, 1.45 * top)  # room above every line for the legend
    axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _throughput(axes: Axes, history: History, unit: str) -> None:
    axes.set_title("Throughput of training")
    axes.set_xlabel(f"time ({unit})")
    axes.set_ylabel("sampled tokens per second", color=BLUE)
    window = max(3, window_of(len(history.updates)))
    parts = by_start(history.updates)
    for index, part in enumerate(parts):
        _line(axes, *rates(part, "batch/sampled_tokens", window), BLUE, "" if index else "sampled tokens/s")
    curves = [curve for part in parts if (curve := rates(part, "batch/trajectories", window))[0]]
    if curves:
        right = axes.twinx()
        right.set_ylabel("trajectories per second", color=GREEN)
        for curve in curves:
            _line(right, *curve, GREEN, "", style="--")
        right.set_ylim(bottom=0)
        right.spines[["top", "left", "bottom"]].set_visible(False)
        axes.plot([], [], color=GREEN, linestyle="--", label="trajectories/s")
    axes.set_ylim(bottom=0)


def _left_out(axes: Axes, history: History) -> None:
    axes.set_title("Tokens without gradient, share of the sampled ones")
    axes.set_xlabel("completed updates")
    for name, color, label in (
        ("policy/masked_tokens", PURPLE, "masked: ratio outside the trust region"),
        ("policy/rejected_tokens", RED, "too stale: beyond the bound"),
    ):
        shares = [
            {"update": record["update"], "share": record[name] / record["policy/tokens"]}
            for record in history.updates
            if isinstance(record.get(name), (int, float)) and record.get("policy/tokens")
        ]
        _smoothed(axes, *series(shares, "update", "share"), color, label)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if axes.lines:
        axes.set_ylim(0, max(0.02, axes.get_ylim()[1]))


def _phases(axes: Axes, history: History) -> None:
    axes.set_title("What the learner does, seconds a batch")
    axes.set_xlabel("batches")
    parts = (
        ("time/wait_s", "waits for a batch", GREY),
        ("time/value_s", "value function", GREEN),
        ("time/policy_s", "policy update", BLUE),
        ("other", "prepares, and other work of the update", PURPLE),
        ("time/publish_s", "publishes weights", ORANGE),
    )
    rows = [record for record in history.updates if isinstance(record.get("time/update_s"), (int, float))]
    if not rows:
        return
    at = np.arange(1, 1 + len(rows))
    if len(rows) > 2:  # the first batch of a start waits for the engines, which would flatten the rest
        later = [index for index in range(1, len(rows)) if rows[index]["start"] == rows[index - 1]["start"]]
        at, rows = at[later], [rows[index] for index in later]
    if not rows:
        return
    values = {name: [float(record.get(name) or 0.0) for record in rows] for name, _, _ in parts}
    values["other"] = [
        max(
            0.0,
            record["time/update_s"] - float(record.get("time/value_s") or 0) - float(record.get("time/policy_s") or 0),
        )
        for record in rows
    ]
    window = window_of(len(rows))
    heights = [smooth(values[name], window) for name, _, _ in parts]
    labels, colors = [label for _, label, _ in parts], [color for _, _, color in parts]
    if len(rows) == 1:
        bottom = 0.0
        for height, label, color in zip(heights, labels, colors, strict=True):
            axes.bar([1], height, 0.4, bottom=bottom, color=color, label=label)
            bottom += height[0]
        axes.set_xlim(0, 4)
    else:
        axes.stackplot(at, *heights, labels=labels, colors=colors, alpha=0.85)
        axes.set_xlim(at[0], at[-1])
    totals = np.sum(heights, axis=0)
    axes.set_ylim(0, max(float(np.percentile(totals, 97)) * 1.45, 1e-3))  # room for the legend, not for outliers


def _smoothed(axes: Axes, x: list[float], y: list[float], color: str, label: str, window: int | None = None) -> None:
    """A strong line of moving means over a faint one of the values themselves."""
    window = window or window_of(len(y))
    if window > 1:
        axes.plot(x, y, color=color, alpha=0.25, linewidth=1)
        label = label and f"{label} (moving mean of {window})"
    _line(axes, x, smooth(y, window), color, label)


def _line(
    axes: Axes,
    x: list[float],
    y: list[float],
    color: str,
    label: str,
    *,
    marker: str = "",
    style: str = "-",
    width: float = 1.8,
) -> None:
    if x:
        marker = marker or ("o" if len(x) == 1 else "")
        axes.plot(x, y, color=color, label=label or None, marker=marker, markersize=5, linestyle=style, linewidth=width)


def _dress(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontweight("bold")
    axes.title.set_fontsize(11)
    if axes.get_xlabel() in ("completed updates", "batches"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        middle = sum(axes.get_xlim()) / 2
        if axes.get_xlim()[1] - axes.get_xlim()[0] < 1:  # a single update
            axes.set_xlim(middle - 1, middle + 1)
    if axes.has_data():
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        if axes.get_legend() is None:
            axes.legend(frameon=False, fontsize=8.5, loc="best")
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylabel("")
        axes.text(0.5, 0.5, "no data yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
