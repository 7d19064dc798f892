"""Publications of other nodes, fetched once per node into its shared memory."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from common.errors import ResourceError
from common.weights import WeightManifest

KEEP = 2  # newest files that stay: an engine may still read the one before


class NodeCache:
    """Makes a manifest's file readable on this node. Actors of one node share what one of them fetched.

    Args:
        folder: shared memory of this node.
        node_id: this node; a manifest that names it is left as it is.
        fetch: brings the bytes of another node's publication; raises FileNotFoundError if it is gone.
    """

    def __init__(self, folder: Path, node_id: str, fetch: Callable[[WeightManifest], Awaitable[bytes]]) -> None:
        self._folder = folder
        self._node_id = node_id
        self._fetch = fetch
        self._fetched: list[Path] = []  # by this actor, oldest first

    async def localise(self, manifest: WeightManifest) -> WeightManifest:
        """The same manifest with a path of this node.

        A publication that is gone, because newer ones are out, stays as it is: the engine refuses it, and the newest is
        tried next.

        Raises:
            ResourceError: the folder has no room.
        """
        if not manifest.node_id or manifest.node_id == self._node_id:
            return manifest
        path = self._folder / f"{self._node_id[:8]}-{Path(manifest.path).name}"
        try:
            async with self._locked():
                if not path.exists():
                    partial = path.with_suffix(".partial")
                    try:
                        data = await self._fetch(manifest)
                    except FileNotFoundError:
                        return manifest
                    partial.write_bytes(data)
                    partial.rename(path)
                    self._fetched.append(path)
            self._remove(self._fetched[:-KEEP])
        except OSError as error:
            raise ResourceError(
                f"weights.folder = {str(self._folder)!r} cannot take a publication of {manifest.size_bytes:,} bytes "
                f"({error.strerror}): make room on node {self._node_id[:8]}, or name another folder"
            ) from error
        return replace(manifest, path=str(path), node_id=self._node_id)

    def close(self) -> None:
        """Remove what this actor fetched."""
        self._remove(list(self._fetched))

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            self._fetched.remove(path)

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """One actor of the node at a time; a lock of a dead one is free."""
        lock = self._folder / f"{self._node_id[:8]}-slipstream.lock"
        with lock.open("w") as file:
            await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
            yield
