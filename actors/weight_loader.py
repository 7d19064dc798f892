"""Keeps one engine at the newest weights it was told of."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from actors.engine import Engine
from common.errors import PublicationGoneError, WeightUpdateError
from common.weights import WeightManifest

log = logging.getLogger(__name__)

MAX_REFUSALS = 6  # publications refused in a row; a newer one mends a file that was overwritten meanwhile
MAX_DOUBLINGS = 5  # of the pause while publications are gone


class WeightLoader:
    """Loads publications one after the other, always the newest, while the engine goes on generating.

    Its calls belong to one event loop.

    Args:
        max_delay_s: longest time that `held` puts off a load.
        first_pause_s: pause after a publication that was refused or gone; doubles with each in a row.
    """

    def __init__(self, engine: Engine, *, max_delay_s: float, first_pause_s: float) -> None:
        self._engine = engine
        self._max_delay_s = max_delay_s
        self._first_pause_s = first_pause_s
        self._newest: WeightManifest | None = None
        self._news = asyncio.Event()
        self._loaded = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._holders = 0
        self._unheld = asyncio.Event()
        self._unheld.set()
        self._end: BaseException | None = None
        self._gone_in_a_row = 0
        self.loads = 0
        self.refusals = 0
        self.stall_s = 0.0
        """Time that the engine generated nothing because of loads."""

    @property
    def known_version(self) -> int:
        """The newest version it was told of, loaded or not."""
        return max(self._engine.weight_version, self._newest.version if self._newest else 0)

    def tell(self, manifest: WeightManifest) -> None:
        """There is a publication."""
        if self._newest is None or manifest.version > self._newest.version:
            self._newest = manifest
            self._news.set()

    async def at_least(self, version: int) -> None:
        """Wait until the engine serves `version` or a newer one.

        Raises:
            BaseException: what `stop` was called with.
        """
        async with self._loaded:
            await self._loaded.wait_for(lambda: self._engine.weight_version >= version or self._end is not None)
        if self._engine.weight_version < version and self._end is not None:
            raise self._end

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """While it is entered, loads are put off, up to `max_delay_s` each. Waits for a load that is under way."""
        async with self._loading:
            self._holders += 1
            self._unheld.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._unheld.set()

    async def run(self) -> None:
        """Load whatever `tell` brings, for ever.

        A publication whose file is gone says nothing against the engine: newer ones are out, or the learner is being
        replaced, which takes as long as it takes. The engine goes on with the version it has.

        Raises:
            WeightUpdateError: `MAX_REFUSALS` publications in a row were refused for what they hold.
            CanaryError, EngineDeadError: see `Engine.load_weights`.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            await self._wait_while_held()
            try:
                await self._load_newest()
            except PublicationGoneError as error:
                await self._wait_for_another(error)
            else:
                self._gone_in_a_row = 0

    async def stop(self, reason: BaseException) -> None:
        """Nothing will be loaded any more: whoever waits gets `reason`."""
        self._end = reason
        async with self._loaded:
            self._loaded.notify_all()

    async def _wait_while_held(self) -> None:
        try:
            # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes in the moment its wait ends.
            async with asyncio.timeout(self._max_delay_s):
                await self._unheld.wait()
        except TimeoutError:
            log.warning("weights are loaded in the middle of an evaluation: it took longer than evaluation.max_delay_s")

    async def _wait_for_another(self, error: PublicationGoneError) -> None:
        pause_s = self._first_pause_s * 2 ** min(self._gone_in_a_row, MAX_DOUBLINGS)
        self._gone_in_a_row += 1
        self.refusals += 1
        log.warning("version %d goes on serving: %s", self._engine.weight_version, error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        if not self._news.is_set():
            self._newest = None  # it is asked for again: a restored learner may publish the same version elsewhere

    async def _load_newest(self) -> None:
        async with self._loading:
            for refusal in range(MAX_REFUSALS):
                manifest = self._newest  # perhaps newer than the one that was refused
                if manifest is None or manifest.version <= self._engine.weight_version:
                    return
                try:
                    update = await self._engine.load_weights(manifest)
                except PublicationGoneError:
                    raise
                except WeightUpdateError as error:
                    self.refusals += 1
                    log.warning("weights of version %d are refused: %s", manifest.version, error)
                    if refusal + 1 == MAX_REFUSALS:
                        raise
                    await asyncio.sleep(self._first_pause_s * 2**refusal)
                else:
                    self.loads += 1
                    self.stall_s += update.stall_s
                    break
        async with self._loaded:
            self._loaded.notify_all()
