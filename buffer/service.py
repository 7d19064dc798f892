"""The replay buffer as a Ray actor: hosts a `ReplayBuffer`, waits on behalf of its callers, decides nothing.

Every method is a coroutine on one event loop, so calls are serialised and a call that waits blocks no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from buffer.archive import TrajectoryArchive
from buffer.build import build_buffer
from buffer.links import Poll
from buffer.replay import BufferStatus, ReplayBuffer
from buffer.spill import SpillingStore
from common import columns, wire
from common.config import RunConfig
from common.errors import WireError
from common.logs import log_to_file
from common.types import BatchId, BatchOutcome, Failure, Lease, LeaseId, Receipt, WeightVersion
from common.weights import WeightManifest

TICK_S = 0.5  # how often expired leases and late group members are looked for while somebody waits
T = TypeVar("T")


class ReplayBufferService:
    """Ray shell of `ReplayBuffer`. Start it with `ray.remote`; see deploy/services.py."""

    def __init__(self, config: RunConfig, run_dir: Path, state: Mapping[str, Any] | None = None) -> None:
        log_to_file(run_dir, "buffer")
        self._config = config
        self._run_dir = run_dir
        self._state = state
        self._buffer: ReplayBuffer  # these three are made by `start`
        self._archive: TrajectoryArchive
        self._store: SpillingStore
        self._started = False
        self._manifest: WeightManifest | None = None
        self._issuing = True
        self._closing = False
        self._changed = asyncio.Event()

    async def start(self) -> int:
        """Make the buffer; returns the rows of the training data. To be called before anything else.

        Not in the constructor: Ray would not pass on what is raised there.

        Raises:
            DataError, ConfigError: see `build_buffer`.
        """
        self._store = SpillingStore(self._run_dir / "finished")
        self._archive = TrajectoryArchive(self._run_dir / "trajectories")
        self._buffer = build_buffer(
            self._config, clock=time.monotonic, store=self._store, archive=self._archive, state=self._state
        )
        self._started = True
        return self._buffer.num_rows

    # For actors

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        """See `ActorLink`. An actor that was reported dead is sent away at once."""

        def answer() -> Poll | None:
            if self._buffer.reported_dead(actor_id):
                return Poll(closing=True)
            newer = self._manifest if self._manifest and self._manifest.version > loaded_version else None
            leases: list[Lease] = []
            if self._issuing and not self._closing and num_slots and self._manifest:
                leases = self._buffer.lease(actor_id, num_slots)
            if leases or newer or self._closing:
                return Poll(leases=tuple(leases), manifest=newer, closing=self._closing)
            return None

        return await self._wait_for(answer, wait_s) or Poll()

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        return self._buffer.heartbeat(actor_id, lease_ids)

    async def complete(self, message: bytes) -> Receipt:
        receipt = self._buffer.complete(wire.decode(message))
        self._notify()
        return receipt

    async def complete_all(self, messages: Sequence[bytes]) -> list[Receipt | WireError]:
        """Several deliveries, each for itself: what is wrong with one comes back in its place."""
        answers: list[Receipt | WireError] = []
        for message in messages:
            try:
                answers.append(await self.complete(message))
            except WireError as error:
                answers.append(error)
        return answers

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        receipt = self._buffer.fail(lease_id, failure)
        self._notify()
        return receipt

    async def lose_actor(self, actor_id: str) -> int:
        """The actor is dead, and its id void; returns how many of its leases went back to the pool."""
        lost = self._buffer.lose_actor(actor_id)
        self._notify()
        return lost

    # For the learner

    async def take_batch(self, wait_s: float) -> tuple[dict[str, Any], bytes] | None:
        """Fields of the batch and its trajectories as an Arrow stream; none when `wait_s` passed without one."""
        batch = await self._wait_for(self._buffer.take_batch, wait_s)
        self._notify()  # forming a batch drops what is too stale, which may open the gate
        if batch is None:
            return None
        fields = {name: getattr(batch, name) for name in ("batch_id", "version", "is_last", "is_tail")}
        return fields, columns.to_bytes(columns.to_table(batch.trajectories))

    async def announce(self, manifest: WeightManifest) -> None:
        self._buffer.note_published(WeightVersion(manifest.version))
        self._manifest = manifest
        self._notify()

    async def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        self._buffer.finish(batch_id, outcome, version)
        self._notify()

    async def restore(self, last_finished_batch: BatchId | None, version: WeightVersion) -> WeightVersion:
        """Samples of batches after the checkpoint are ready again; returns the version to publish under."""
        label = self._buffer.restore(last_finished_batch, version)
        self._notify()
        return label

    async def state(self) -> Mapping[str, Any]:
        return self._buffer.state()

    async def forget_batches_up_to(self, batch_id: BatchId) -> None:
        self._buffer.forget_batches_up_to(batch_id)

    # For the driver

    async def status(self) -> BufferStatus:
        self._buffer.tick()
        self._archive.flush_if_due()
        self._notify()
        return self._buffer.snapshot()

    async def missing(self) -> str:
        return self._buffer.missing()

    async def stop_issuing(self) -> None:
        """No more leases; weights still go out, for the last evaluation."""
        self._issuing = False

    async def close(self) -> None:
        """Tell every actor that the run is over."""
        self._closing = True
        self._notify()
        if self._started:
            self._archive.close()
            self._store.close()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for(self, ready: Callable[[], T | None], wait_s: float) -> T | None:
        """First non-empty answer of `ready`, asked again at every change; none after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            changed = self._changed
            answer = ready()
            left = deadline - time.monotonic()
            if answer is not None or left <= 0:
                return answer
            try:
                async with asyncio.timeout(min(left, TICK_S)):
                    await changed.wait()
            except TimeoutError:
                self._buffer.tick()
