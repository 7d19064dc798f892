"""metrics.jsonl as one story, though a run may have been resumed, and have gone back to a checkpoint, several times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.run_dir import Record, RunDir


@dataclass
class History:
    """What is in the surviving weights, in order.

    A record's `time_s` counts the time of all starts, and `start` numbers the one in which it was made, from 1 on.
    """

    updates: list[Record] = field(default_factory=list)  # batches, those without an update too
    evaluations: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    starts: int = 1  # 1 + times the run was resumed
    undone: int = 0  # batches that a restore took back

    @property
    def duration_s(self) -> float:
        return max((record["time_s"] for record in (*self.updates, *self.evaluations, *self.events)), default=0.0)

    @property
    def completed_updates(self) -> int:
        return int(self.updates[-1]["update"]) if self.updates else 0


def read_history(run_dir: Path) -> History:
    """History of the run in a folder; empty when nothing was recorded yet."""
    return tell(RunDir(run_dir).records())


def tell(records: Iterable[Record]) -> History:
    """Put records in order: time goes on over resumes, and what a restore took back is left out."""
    history = History()
    before_s = last_s = 0.0
    for record in records:
        time_s = _number(record.get("time_s"), last_s - before_s)
        if before_s + time_s < last_s - 1.0:  # the clock began anew: a resume. Records may be out of order by a bit
            before_s = last_s
            history.starts += 1
        last_s = max(last_s, before_s + time_s)
        record = {**record, "time_s": before_s + time_s, "start": history.starts}
        if record.get("kind") == "update":
            _add_update(history, record)
        elif record.get("kind") == "evaluation":
            same = record.get("update")  # a resumed run evaluates once more what it starts from
            history.evaluations = [*(other for other in history.evaluations if other.get("update") != same), record]
        elif record.get("kind") == "event":
            history.events.append(record)
    return history


def series(records: Iterable[Record], x: str, y: str) -> tuple[list[float], list[float]]:
    """Those records that have both numbers."""
    pairs = [(record.get(x), record.get(y)) for record in records]
    kept = [(float(a), float(b)) for a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float))]
    return [a for a, _ in kept], [b for _, b in kept]


def by_start(records: Iterable[Record]) -> list[list[Record]]:
    """Records of each start together: between two of them no time of the run passed that anything can be drawn over."""
    parts: dict[int, list[Record]] = {}
    for record in records:
        parts.setdefault(record["start"], []).append(record)
    return list(parts.values())


def _add_update(history: History, record: Record) -> None:
    """A batch after a restore carries an update number that was there before: those are taken back."""
    number = int(_number(record.get("update"), 0))
    record["update"] = number
    first_undone = number if record.get("outcome", "committed") == "committed" else number + 1
    kept = [other for other in history.updates if other["update"] < first_undone]
    history.undone += len(history.updates) - len(kept)
    history.updates = [*kept, record]
    history.evaluations = [other for other in history.evaluations if _number(other.get("update"), 0) <= number]


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise
