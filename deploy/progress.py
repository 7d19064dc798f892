"""What a person sees while a run goes on: a live view on a terminal, plain lines in a log.

Nothing is silent for long: a terminal shows a moving clock, and a log gets a line whenever none came for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeGuard

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from buffer.status import BufferStatus
from common.config import RunConfig
from deploy.format import arrow, duration, plural

Record = Mapping[str, Any]

LINE_EVERY_S = 5.0  # between two update lines of a log
SILENCE_S = 15.0  # after which a log gets a line that says what is going on
START_SILENCE_S = 5.0  # the same before the first batch and after the last, when nothing else is said
RATE_WINDOW = 12  # batches that rates are taken over
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40


class Progress:
    """Shows a run. Every method may be called from any thread.

    Example::

        with Progress(config) as progress:
            progress.phase("starting the learner")
            progress.update({"update": 1, "time_s": 20.1, "batch/reward_mean": 0.4})

    Args:
        config: gives the numbers that a run is to reach; without it they are not shown.
        console: where to write; none: standard error.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        config: RunConfig | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live_view = self._console.is_terminal and not self._console.is_dumb_terminal
        self._clock = clock
        self._began = self._phase_began = self._last_line = clock()
        self._last_update_line: float | None = None
        self._phase = "starting"
        self._ended = ""  # how, once it did
        self._rewards: deque[float] = deque(maxlen=SPARK_WIDTH)
        self._recent: deque[Record] = deque(maxlen=RATE_WINDOW)
        self._held_out: list[tuple[int, float]] = []  # update, mean reward
        self._last: Record = {}
        self._status: BufferStatus | None = None
        self._running: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._live_view:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._thread = threading.Thread(target=self._watch_silence, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = "done" if kind is None else "interrupted" if kind is KeyboardInterrupt else "failed"
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    # What happens

    def phase(self, text: str) -> None:
        """What the run is doing from now on."""
        with self._lock:
            self._phase, self._phase_began = text, self._clock()
        if not self._live_view:
            self._print(text)

    def event(self, text: str) -> None:
        """Something worth keeping on the screen."""
        self._print(text)

    def update(self, record: Record) -> None:
        """A batch was trained on; see common/run_metrics.py for the numbers."""
        with self._lock:
            if self._phase != "training":
                self._phase, self._phase_began = "training", self._clock()
            self._last = record
            self._recent.append(record)
            if _is_number(reward := record.get("batch/reward_mean")):
                self._rewards.append(float(reward))
            now = self._clock()
            due = self._last_update_line is None or now - self._last_update_line >= LINE_EVERY_S or self._is_final()
        if due and not self._live_view:
            self._last_update_line = now
            self._print(self.update_line())

    def evaluation(self, record: Record) -> None:
        """Held-out prompts were generated for and scored."""
        reward = record.get("eval/reward_mean")
        if not _is_number(reward):
            self._print(f"evaluation of update {record.get('update')}: no prompt could be scored")
            return
        with self._lock:
            self._held_out.append((int(record.get("update") or 0), float(reward)))
        count = record.get("eval/count")
        self._print(
            f"held-out reward {reward:.3f} of update {record.get('update')}" + (f" ({count} prompts)" if count else "")
        )

    def status(self, status: BufferStatus, running: Sequence[str]) -> None:
        """State of the buffer, and the actors whose engine is up."""
        with self._lock:
            self._status, self._running = status, tuple(running)

    # Plain lines

    def update_line(self) -> str:
        """The newest batch in one line."""
        record = self._last
        outcome = record.get("outcome", "committed")
        parts = [f"update {self._of_max(record.get('update', 0))}"]
        parts += [f"({outcome.replace('_', ' ')})"] if outcome != "committed" else []
        parts += [f"reward {self._rewards[-1]:.3f}"] if self._rewards else []
        parts += [part for part in (self._speed(), self._staleness(), self._left_out()) if part]
        return "  ".join(parts)

    def tick(self) -> None:
        """Say what is going on if nothing was said for a while."""
        now = self._clock()
        if now - self._last_line >= (SILENCE_S if self._phase == "training" else START_SILENCE_S):
            self._print(f"… {self._phase}, {duration(now - self._phase_began)} so far{self._waiting()}")

    def _watch_silence(self) -> None:
        while not self._stop.wait(1.0):
            self.tick()

    def _print(self, text: str) -> None:
        with self._lock:
            self._last_line = self._clock()
            elapsed = duration(self._last_line - self._began)
        line = Text.assemble((f"{elapsed:>11}  ", "dim"), text)
        self._console.print(line)

    # Live view

    def render(self) -> RenderableType:
        """The view at this moment."""
        with self._lock:
            table = Table.grid(padding=(0, 2))
            table.add_column(style="dim", justify="right", min_width=11)
            table.add_column()
            for name, content in self._rows():
                table.add_row(name, content)
        return Group(Text(), table)

    def _rows(self) -> list[tuple[str, RenderableType]]:
        now = self._clock()
        phase = Text.assemble((self._phase, "bold"), (f"  {duration(now - self._phase_began)}", "dim"))
        self._spinner.update(text=phase)
        head = Text(self._ended, "bold") if self._ended else self._spinner
        rows: list[tuple[str, RenderableType]] = [(duration(now - self._began), head)]
        if self._last:
            rows.append(("updates", self._bar()))
        if self._rewards:
            rows.append(("reward", f"{self._rewards[-1]:.3f}  {sparkline(list(self._rewards))}"))
        if self._held_out:
            first, last = self._held_out[0][1], self._held_out[-1]
            text = arrow(first, last[1] if len(self._held_out) > 1 else None)
            rows.append(("held-out", f"{text}  of update {last[0]}"))
        line = "  ".join(part for part in (self._speed(), self._staleness(), self._left_out()) if part)
        if line:
            rows.append(("training", line))
        if self._status is not None:
            if not self._ended:
                rows.append(("buffer", self._buffer_line(self._status)))
                rows.append(("actors", self._actors_line()))
            rows += [("warning", Text(text, "yellow")) for text in warnings(self._status)]
        return rows

    def _bar(self) -> RenderableType:
        done = int(self._last.get("update", 0))
        if self._config is None:
            return f"{done}"
        grid = Table.grid(padding=(0, 2))
        left = f"about {duration(left_s)} left" if (left_s := self._time_left()) and not self._ended else ""
        # Colours that every terminal has: those of the library turn to grey where there are only sixteen.
        bar = ProgressBar(
            self._config.max_updates,
            done,
            width=SPARK_WIDTH,
            style="bright_black",
            complete_style="cyan",
            finished_style="green",
        )
        grid.add_row(bar, self._of_max(done), left)
        return grid

    def _buffer_line(self, status: BufferStatus) -> str:
        counts = status.counts
        parts = {
            "generating": counts.queued + counts.leased,
            "waiting": counts.assembling + counts.ready,
            "in training": counts.in_training,
            "trained": counts.trained,
            "dropped": sum(counts.dropped.values()),
        }
        return " · ".join(f"{count:,} {name}" for name, count in parts.items())

    def _actors_line(self) -> str:
        wanted = f" of {self._config.rollout.num_actors}" if self._config else ""
        names = ", ".join(self._running[:6]) + (", …" if len(self._running) > 6 else "")
        return f"{len(self._running)}{wanted} running" + (f": {names}" if names else "")

    # Numbers

    def _of_max(self, update: int) -> str:
        return f"{update}/{self._config.max_updates}" if self._config else f"{update}"

    def _is_final(self) -> bool:
        return self._config is not None and int(self._last.get("update") or 0) >= self._config.max_updates

    def _rate(self, name: str) -> float | None:
        """Amount per second over the latest batches; none before the second."""
        if len(self._recent) < 2:
            return None
        passed = float(self._recent[-1].get("time_s", 0)) - float(self._recent[0].get("time_s", 0))
        amount = sum(float(record.get(name) or 0) for record in list(self._recent)[1:])
        return amount / passed if passed > 0 and amount else None

    def _time_left(self) -> float | None:
        if self._config is None or len(self._recent) < 2:
            return None
        passed = float(self._recent[-1].get("time_s", 0)) - float(self._recent[0].get("time_s", 0))
        made = int(self._recent[-1].get("update", 0)) - int(self._recent[0].get("update", 0))
        return passed / made * (self._config.max_updates - int(self._last.get("update", 0))) if made > 0 else None

    def _speed(self) -> str:
        trajectories, tokens = self._rate("batch/trajectories"), self._rate("batch/sampled_tokens")
        parts = [f"{trajectories:,.3g} trajectories/s"] if trajectories else []
        parts += [f"{tokens:,.0f} tokens/s"] if tokens else []
        return "  ".join(parts)

    def _staleness(self) -> str:
        mean, largest = self._last.get("staleness/mean"), self._last.get("staleness/max")
        if not _is_number(mean) or not _is_number(largest):
            return ""
        return f"staleness {mean:.1f}" + (f" (sampled up to {plural(int(largest), 'version')} ago)" if largest else "")

    def _left_out(self) -> str:
        """Tokens without gradient: of the fresh ones by their ratio, and those staler than the bound."""
        tokens = self._last.get("policy/tokens")
        if not _is_number(tokens) or not tokens:
            return ""
        counts = {
            "masked": self._last.get("policy/masked_tokens"),
            "too stale": self._last.get("policy/rejected_tokens"),
        }
        return "  ".join(
            f"{name} {count / tokens:.1%}" for name, count in counts.items() if _is_number(count) and count
        )

    def _waiting(self) -> str:
        if self._status is None or not self._status.counts.issued:
            return ""
        return f"; buffer: {self._buffer_line(self._status)}; actors: {self._actors_line()}"


def sparkline(values: Sequence[float]) -> str:
    """One character a value, between 0 and 1 if all are, else between the smallest and the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    span = high - low or 1.0
    return "".join(SPARKS[min(int((value - low) / span * len(SPARKS)), len(SPARKS) - 1)] for value in values)


def warnings(status: BufferStatus) -> list[str]:
    """What a person should know before it becomes an error."""
    lines = []
    if status.failed_prompts:
        count, name = len(status.failed_prompts), status.failed_prompts[-1]
        lines.append(f"{plural(count, 'prompt')} failed at every attempt, the latest: {name}")
    if status.beyond_bound:
        name, times = max(status.beyond_bound.items(), key=lambda item: item[1])
        count = len(status.beyond_bound)
        lines.append(f"too slow for the staleness bound: {plural(count, 'prompt')}, {name} {plural(times, 'time')}")
    if status.no_update_in_a_row:
        lines.append(f"batches without an update, one after the other: {status.no_update_in_a_row}")
    return lines


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
