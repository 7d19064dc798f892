"""Checkpoints of the learner: whole or not there, and checked byte for byte before one is restored."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from common.errors import ResourceError
from common.types import BatchId
from learner.state import read_counters, state_size_bytes, write_state

if TYPE_CHECKING:
    from learner.update import Learner

log = logging.getLogger(__name__)

PREFIX = "update-"
ASIDE = ".aside-"  # folders of this prefix are unfinished or on their way out
REPLACED = "-replaced"  # what a folder aside ends with while another takes its place
MARKER = "complete.json"  # size and digest of every other file; written last


class CheckpointStore:
    """A folder of checkpoints, named by completed updates.

    A checkpoint is written aside, forced to disk, marked complete and renamed. The older ones beyond `keep` go only
    after that. Those of more updates go before: they are of a part of the run that was given up when an older one was
    restored, and none may be taken for the newest.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(
        self, learner: Learner, *, last_finished_batch: BatchId | None, buffer_state: Mapping[str, Any]
    ) -> tuple[Path, BatchId | None]:
        """Save everything that a restored learner needs.

        Returns:
            The checkpoint's folder; and the last finished batch of the oldest checkpoint kept: samples of batches up to
            it are in the weights of every one.

        Raises:
            ResourceError: no space, or the folder cannot be written to; checkpoints of fewer updates are as they were.
        """
        target = self._folder / f"{PREFIX}{learner.completed_updates:08d}"
        aside = self._folder / f"{ASIDE}{target.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._remove_after(target)
            self._require_space(state_size_bytes(learner))
            aside.mkdir()
            write_state(learner, aside, last_finished_batch=last_finished_batch, buffer_state=buffer_state)
            seal(aside)
            self._put_in_place(aside, target)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise self._explained(error, learner) from error
        return target, self._remove_old(target)

    def newest(self) -> Path | None:
        """Folder of the newest complete checkpoint; says in the log which newer ones are passed over, and why."""
        self._put_back()
        for folder in self._folders():
            problem = find_damage(folder)
            if not problem:
                return folder
            log.warning("checkpoint %s is passed over: %s", folder, problem)
        return None

    def _folders(self) -> list[Path]:
        """Newest first."""
        return sorted(self._folder.glob(f"{PREFIX}[0-9]*"), reverse=True)

    def _put_back(self) -> None:
        """Undo a replacement that was broken off between its two renames."""
        for replaced in self._folder.glob(f"{ASIDE}*{REPLACED}"):
            original = self._folder / replaced.name.removeprefix(ASIDE).removesuffix(REPLACED)
            if not original.exists():
                replaced.rename(original)

    def _remove_after(self, target: Path) -> None:
        for folder in self._folders():
            if folder.name > target.name:
                log.warning("checkpoint %s is removed: training went on from an older one", folder)
                shutil.rmtree(folder)

    def _remove_leftovers(self) -> None:
        for leftover in self._folder.glob(f"{ASIDE}*"):
            shutil.rmtree(leftover)

    def _put_in_place(self, aside: Path, target: Path) -> None:
        if target.exists():  # damaged, or of fewer batches without an update
            replaced = aside.with_name(f"{aside.name}{REPLACED}")
            target.rename(replaced)
            aside.rename(target)
            shutil.rmtree(replaced)
        else:
            aside.rename(target)
        _force_to_disk(self._folder)

    def _remove_old(self, newest: Path) -> BatchId | None:
        """Remove complete checkpoints beyond the newest `keep`; the last finished batch of the oldest one left."""
        complete = [folder for folder in self._folders() if (folder / MARKER).is_file()]
        assert complete[0] == newest
        for folder in complete[self._keep :]:
            shutil.rmtree(folder)
        oldest = read_counters(complete[: self._keep][-1]).last_finished_batch
        return None if oldest is None else BatchId(oldest)

    def _require_space(self, needed_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._folder).free
        if needed_bytes > free_bytes:
            raise self._no_space(needed_bytes, free_bytes)

    def _no_space(self, needed_bytes: int, free_bytes: int) -> ResourceError:
        return ResourceError(
            f"checkpoint folder {self._folder} has {free_bytes:,} bytes free, and a checkpoint needs {needed_bytes:,}: "
            "make room, set checkpoint.keep lower, or set another run_dir"
        )

    def _explained(self, error: Exception, learner: Learner) -> Exception:
        # safetensors reports what the system said as text only
        full = getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error)
        if full:
            return self._no_space(state_size_bytes(learner), shutil.disk_usage(self._folder).free)
        if isinstance(error, OSError):
            return ResourceError(f"checkpoint folder {self._folder} cannot be written to: {error}; set another run_dir")
        return error


def seal(folder: Path) -> None:
    """Force every file to disk and write the marker that makes the checkpoint complete."""
    contents = {}
    for file in _files(folder):
        _force_to_disk(file)
        contents[file.relative_to(folder).as_posix()] = {"size_bytes": file.stat().st_size, "digest": _digest(file)}
    marker = folder / MARKER
    marker.write_text(json.dumps(contents, indent=1), encoding="utf-8")
    for path in (marker, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _force_to_disk(path)


def find_damage(folder: Path) -> str:
    """What is wrong with a checkpoint; empty if it is complete, every byte as it was written."""
    try:
        contents = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        for name, expected in contents.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != expected["size_bytes"]:
                return f"{name} has {size} bytes of {expected['size_bytes']}"
        for name, expected in contents.items():
            if _digest(folder / name) != expected["digest"]:
                return f"{name} has been altered"
    except FileNotFoundError:
        return f"it has no {MARKER}, so that its saving was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MARKER} cannot be read: {error!r}"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _digest(file: Path) -> str:
    return blake3().update_mmap(file).hexdigest()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
