"""Publications of other nodes, fetched once per node into its shared memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from common.errors import ResourceError
from common.weights import WeightManifest

KEEP = 2  # newest files that stay: an engine may still read the one before


class NodeCache:
    """Makes a manifest's file readable on this node.

    Args:
        folder: shared memory of this node.
        node_id: this node; a manifest that names it is left as it is.
        fetch: brings the bytes of another node's publication.
    """

    def __init__(self, folder: Path, node_id: str, fetch: Callable[[WeightManifest], Awaitable[bytes]]) -> None:
        self._folder = folder
        self._node_id = node_id
        self._fetch = fetch

    async def localise(self, manifest: WeightManifest) -> WeightManifest:
        """The same manifest with a path of this node.

        Raises:
            ResourceError: the folder has no room.
        """
        if not manifest.node_id or manifest.node_id == self._node_id:
            return manifest
        path = self._folder / f"{self._node_id[:8]}-{Path(manifest.path).name}"
        if not path.exists():
            data = await self._fetch(manifest)
            self._store(path, data)
        return replace(manifest, path=str(path), node_id=self._node_id)

    def _store(self, path: Path, data: bytes) -> None:
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            with (self._folder / f"{self._node_id[:8]}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    partial.write_bytes(data)
                    partial.rename(path)
                self._forget_old(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ResourceError(f"weights cannot be stored in {self._folder}: {error.strerror}") from None

    def _forget_old(self, newest: Path) -> None:
        run = newest.name.rpartition("-v")[0]
        files = sorted(self._folder.glob(f"{run}-v*.bin"), key=lambda file: file.stat().st_mtime)
        for file in files[:-KEEP]:
            file.unlink(missing_ok=True)
