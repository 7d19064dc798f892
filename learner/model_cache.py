"""Models that are made once and kept, each in a folder that is either complete or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from common.errors import ResourceError

ABANDONED_AFTER_S = 24 * 3600.0


def default_cache_dir() -> Path:
    """`$SLIPSTREAM_CACHE`, else `~/.cache/slipstream`."""
    return Path(os.environ.get("SLIPSTREAM_CACHE") or "~/.cache/slipstream").expanduser()


def cached_folder(cache_dir: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `cache_dir/name`, made by `build` unless it is there.

    `build` fills an empty folder beside it, which is then renamed; so a process that is killed leaves nothing that
    looks complete, and of several processes that build at once the first to finish wins and the others use its result.

    Raises:
        ResourceError: the cache cannot be written.
    """
    final = cache_dir / name
    if final.is_dir():
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache_dir, name)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_dir, ignore_cleanup_errors=True) as outer:
            partial = Path(outer) / name  # not `outer` itself: that is private to this user
            partial.mkdir()
            build(partial)
            _flush(partial)
            try:
                partial.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
        return final
    except (OSError, SafetensorError) as error:
        raise ResourceError(
            f"the model cache {cache_dir} cannot be written: {error}; "
            "free some space, or set SLIPSTREAM_CACHE to another folder"
        ) from error


def _remove_abandoned(cache_dir: Path, name: str) -> None:
    """Delete what killed builds left; a build that is still running is younger."""
    for partial in cache_dir.glob(f".{name}-*"):
        if time.time() - partial.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(partial, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Force contents to disk: otherwise a power failure after the rename could leave a whole folder of empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
