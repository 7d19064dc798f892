"""A store that moves the trajectories of finished batches to disk, where they do not count against the byte limit.

They are needed only if the learner goes back to a checkpoint from before their batch. Without checkpoints, or during a
long value warm-up, that is all of them. Nothing here outlives the process: a new buffer removes what an old one left.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer import groups
from buffer.records import BatchRecord
from buffer.store import Changes, MemoryStore
from common import wire
from common.errors import ResourceError, WireError
from common.types import SampleId, Trajectory

log = logging.getLogger(__name__)

FILE = "batch-{:08d}.bin"  # messages of common/wire.py, one after the other


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trajectory is."""

    path: Path
    offset: int
    size_bytes: int


class SpillingStore(MemoryStore):
    """As `MemoryStore`, but for the trajectories of finished batches: one file a batch, gone with its last trajectory.

    A batch that cannot be written stays in memory, and the log says so once.

    Args:
        folder: of this store alone; made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._places: dict[SampleId, Place] = {}
        self._num_in: Counter[Path] = Counter()  # trajectories in each file
        self._complained = False
        self._remove_files()

    def write(self, changes: Changes) -> None:
        removed_units = [self._units[unit_id] for unit_id in changes.removed_units if unit_id in self._units]
        removed = [sample.sample_id for unit in removed_units for sample in unit.samples]
        super().write(changes)
        for sample_id in (*changes.removed_payloads, *removed):
            self._remove(sample_id)
        for record in changes.batches.values():
            if record.outcome is not None:
                self._spill(record)

    def payloads(self, sample_ids: Sequence[SampleId]) -> list[Trajectory]:
        """Trajectories in the order asked for.

        Raises:
            ResourceError: a file is gone or damaged.
        """
        return [self._payloads.get(sample_id) or self._read(self._places[sample_id]) for sample_id in sample_ids]

    def close(self) -> None:
        """Remove all files. What was in them is lost."""
        self._places.clear()
        self._num_in.clear()
        self._remove_files()

    def _spill(self, record: BatchRecord) -> None:
        """Move what is in memory of a finished batch; what a restore brought back may be in an older file."""
        samples = [sample for unit_id in record.unit_ids for sample in self._units[unit_id].samples]
        finished = [sample.sample_id for sample in samples if groups.in_finished_batch(sample)]
        messages = {key: wire.encode(self._payloads[key]) for key in finished if key in self._payloads}
        if not messages:
            return
        path = self._folder / FILE.format(record.batch_id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(messages.values())
        except OSError as error:
            self._complain(path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return
        offset = 0
        for sample_id, message in messages.items():
            self._places[sample_id] = Place(path, offset, len(message))
            del self._payloads[sample_id]
            offset += len(message)
        self._num_in[path] = len(messages)

    def _read(self, place: Place) -> Trajectory:
        try:
            with place.path.open("rb") as file:
                file.seek(place.offset)
                return wire.decode(file.read(place.size_bytes))
        except (OSError, WireError) as error:
            raise ResourceError(
                f"{place.path}: a trajectory that the learner needs again cannot be read: {error}; resume the run from "
                "its newest checkpoint"
            ) from error

    def _remove(self, sample_id: SampleId) -> None:
        place = self._places.pop(sample_id, None)
        if place is None:
            return
        self._num_in[place.path] -= 1
        if not self._num_in[place.path]:
            del self._num_in[place.path]
            with contextlib.suppress(OSError):
                place.path.unlink(missing_ok=True)

    def _remove_files(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._folder.glob(FILE.replace("{:08d}", "*")):
                path.unlink(missing_ok=True)
            self._folder.rmdir()

    def _complain(self, path: Path, error: OSError) -> None:
        if not self._complained:
            log.warning(
                "trajectories of finished batches stay in memory, training goes on: %s: %s; free space under %s or "
                "move run_dir (this is said once)",
                path,
                error,
                self._folder,
            )
        self._complained = True
