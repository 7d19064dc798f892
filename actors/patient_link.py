"""A link that sits out a buffer that cannot be reached for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from buffer.links import ActorLink, Poll
from common.types import Failure, LeaseId, Receipt, Trajectory

log = logging.getLogger(__name__)
T = TypeVar("T")

UNREACHABLE = (ConnectionError, TimeoutError)
FIRST_PAUSE_S = 0.1  # doubles
LONGEST_PAUSE_S = 5.0


class PatientLink:
    """`ActorLink` that repeats a call, with growing pauses, until the buffer answers. Every call may be repeated.

    Args:
        patience_s: of one call; then its error is raised.
    """

    def __init__(self, link: ActorLink, *, patience_s: float, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._link = link
        self._patience_s = patience_s
        self._first_pause_s = first_pause_s
        self.repeats = 0

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        return await self._repeat("poll", lambda: self._link.poll(actor_id, num_slots, loaded_version, wait_s))

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        return await self._repeat("heartbeat", lambda: self._link.heartbeat(actor_id, lease_ids))

    async def complete(self, trajectory: Trajectory) -> Receipt:
        return await self._repeat("delivery", lambda: self._link.complete(trajectory))

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        return await self._repeat("failure", lambda: self._link.fail(lease_id, failure))

    async def _repeat(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        deadline = time.monotonic() + self._patience_s
        pause_s = self._first_pause_s
        while True:
            try:
                return await call()
            except UNREACHABLE as error:
                if time.monotonic() + pause_s > deadline:
                    raise ConnectionError(
                        f"the replay buffer has not answered a {what} for {self._patience_s:g} s: {error}"
                    ) from error
                log.warning("the replay buffer cannot be reached for a %s: %s", what, error)
                self.repeats += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
