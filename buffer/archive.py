"""Every trajectory that came to an end, as Parquet files that can be read while the run goes on.

A folder of `part-000000.parquet`, `part-000001.parquet`, …, in the order of writing. Each part appears whole: it is
written under another name and renamed. An archive that cannot be written never ends a run; what is lost is counted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common import columns
from common.types import DropReason, Trajectory

log = logging.getLogger(__name__)

OUTCOMES = ("trained", *(f"dropped_{reason}" for reason in DropReason))  # evaluations are not archived
OUTCOME = [("outcome", pa.string()), ("batch_id", pa.int64()), ("trained_version", pa.int32())]
SCHEMA = pa.schema([*columns.SCHEMA, *OUTCOME])
PART = "part-{:06d}.parquet"
REPEATING = ["prompt_id", "finish_reason", "outcome"]  # dictionaries of tokens and log-probs cost five times the time


class TrajectoryArchive:
    """Collects trajectories and writes a part whenever enough of them, or enough time, has come together.

    Args:
        folder: made if it is missing; parts that are there stay, and new ones are numbered after them.
        max_rows: trajectories that make a part.
        max_age_s: seconds after which fewer make one.
        clock: seconds, never going back.
    """

    def __init__(
        self, folder: Path, *, max_rows: int = 256, max_age_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lost_rows = 0  # of parts that could not be written
        self._folder = folder
        self._max_rows = max_rows
        self._max_age_s = max_age_s
        self._clock = clock
        self._pending: list[tuple[Trajectory, str, int, int]] = []
        self._oldest_at = 0.0  # clock when the first pending row was added
        self._next_part = 1 + max((_number(path) for path in part_files(folder)), default=-1)

    def add(self, trajectory: Trajectory, *, outcome: str, batch_id: int, version: int) -> None:
        """Keep a trajectory that has come to its end.

        Args:
            outcome: one of `OUTCOMES`.
            batch_id: the batch it was trained in; -1 for none.
            version: the learner's weight version when it was trained on, before the update, or when it was dropped.
        """
        if not self._pending:
            self._oldest_at = self._clock()
        self._pending.append((trajectory, outcome, batch_id, version))
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write what is pending if it is old or many. To be called now and then: nothing else looks at the clock."""
        many = len(self._pending) >= self._max_rows
        if self._pending and (many or self._clock() - self._oldest_at >= self._max_age_s):
            self.flush()

    def flush(self) -> None:
        """Write what is pending. A failure is logged once and counted; its rows are let go: memory is bounded."""
        rows, self._pending = self._pending, []
        if not rows:
            return
        path = self._folder / PART.format(self._next_part)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write_whole(path, _table(rows))
            self._next_part += 1
        except (OSError, pa.ArrowException) as error:
            if not self.lost_rows:
                log.warning(
                    "trajectories cannot be archived, training goes on: %s: %s; free space under %s or move run_dir "
                    "(this is said once)",
                    path,
                    error,
                    self._folder,
                )
            self.lost_rows += len(rows)

    def close(self) -> None:
        """Write what is pending; the archive can still be used afterwards."""
        self.flush()


def part_files(folder: Path) -> list[Path]:
    """Whole parts, in the order of writing."""
    return sorted((path for path in folder.glob("part-*.parquet") if _number(path) >= 0), key=_number)


def highest_ids(folder: Path) -> dict[str, int]:
    """Highest sample, lease, group and batch id of what is archived; -1 where there is nothing."""
    names = ["sample_id", "lease_id", "group_id", "batch_id"]
    highest = dict.fromkeys(names, -1)
    for path in part_files(folder):
        table = read_part(path, names)
        if table is not None and table.num_rows:
            for name in names:
                highest[name] = max(highest[name], pc.max(table[name]).as_py())
    return highest


def read_part(path: Path, column_names: list[str] | None = None) -> pa.Table | None:
    """A part's rows with the named columns, or all; none, and a warning, when the file is damaged or gone."""
    try:
        return pq.read_table(path, columns=column_names, partitioning=None)
    except (OSError, pa.ArrowException) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return None


def _number(path: Path) -> int:
    """Of a part; -1 for other files."""
    digits = path.name.removeprefix("part-").removesuffix(".parquet")
    return int(digits) if digits.isdecimal() else -1


def _table(rows: list[tuple[Trajectory, str, int, int]]) -> pa.Table:
    table = columns.to_table([row[0] for row in rows])
    values: list[list[Any]] = [[row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]]
    for (name, kind), column in zip(OUTCOME, values, strict=True):
        table = table.append_column(pa.field(name, kind), pa.array(column, type=kind))
    return table


def _write_whole(path: Path, table: pa.Table) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, aside, compression="zstd", use_dictionary=REPEATING)
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
