"""What the learner tells the driver. Without torch, so that the driver needs none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from common.errors import ResourceError
from common.types import BatchOutcome, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord:
    """What the learner starts from."""

    completed_updates: int
    version: WeightVersion
    checkpoint: str  # folder it was restored from; empty: the starting model
    num_parameters: int
    num_trainable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one batch did."""

    outcome: BatchOutcome
    completed_updates: int
    version: WeightVersion  # after the batch
    metrics: dict[str, float]  # names of common/run_metrics.py
    is_last: bool  # the data ended with this batch
    reason: str = ""  # why there was no update
    checkpoint: str = ""  # folder, when one was saved


HIGHEST_VERSION = "highest_version"  # file in the run directory


def note_highest_version(run_dir: Path, version: WeightVersion) -> None:
    """Put on record, for good, that weights of this label may be served from now on. To be called before they are.

    Raises:
        ResourceError: the run directory cannot be written to.
    """
    file = run_dir / HIGHEST_VERSION
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(f"{max(version, read_highest_version(run_dir))}\n")
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ResourceError(f"{file} cannot be written: {error.strerror}; make room, or set another run_dir") from error


def read_highest_version(run_dir: Path) -> WeightVersion:
    """The highest label under which weights of this run may ever have been served; 0, the starting model's, if none."""
    try:
        return WeightVersion(int((run_dir / HIGHEST_VERSION).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return WeightVersion(0)
