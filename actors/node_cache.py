"""Publications of other nodes, fetched once per node into its shared memory."""

from __future__ import annotations

import asyncio
import fcntl
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from common.errors import ResourceError
from common.publications import fetched_file, unfinished_file
from common.weights import WeightManifest

log = logging.getLogger(__name__)

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

        A publication that is gone, because newer ones are out, stays as it is: the engine refuses it, and the next
        one that is announced is tried.

        Raises:
            ResourceError: the folder has no room.
        """
        if not manifest.node_id or manifest.node_id == self._node_id:
            return manifest
        path = fetched_file(self._folder, self._node_id, manifest.path, manifest.digest)
        try:
            async with self._locked():
                if not path.exists() and not await self._bring(manifest, path):
                    return manifest
            self._remove(self._fetched[:-KEEP])
        except OSError as error:
            raise ResourceError(
                f"weights.folder = {str(self._folder)!r} cannot take a publication of {manifest.size_bytes:,} bytes "
                f"({error.strerror}): make room on node {self._node_id[:8]}, or name another folder"
            ) from error
        return replace(manifest, path=str(path), node_id=self._node_id)

    async def _bring(self, manifest: WeightManifest, path: Path) -> bool:
        """Put the publication at `path`; false if it is gone."""
        try:
            data = await self._fetch(manifest)
        except FileNotFoundError as error:
            log.warning("version %d is gone from its node: %s", manifest.version, error)
            return False
        partial = unfinished_file(path)
        try:
            await asyncio.to_thread(partial.write_bytes, data)  # meanwhile the actor's heart beats
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        self._fetched.append(path)
        return True

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
