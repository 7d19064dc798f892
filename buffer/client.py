"""The buffer's interface over Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from buffer.links import ActorLink, LearnerLink, Poll
from common import columns, wire
from common.types import Batch, BatchId, BatchOutcome, Failure, LeaseId, Receipt, Trajectory, WeightVersion
from common.weights import WeightManifest

__all__ = ["ActorLink", "LearnerLink", "Poll", "RayActorLink", "RayLearnerLink"]

log = logging.getLogger(__name__)

ANSWER_LIMIT_S = 120.0  # of one call
PAUSES_S = (1.0, 4.0, 16.0)  # before a call of the learner is repeated


class RayActorLink:
    """`ActorLink` over Ray.

    Args:
        service: handle of the `ReplayBufferService`.
        localise: makes the file of a publication readable on this node.

    Raises (every call):
        ConnectionError: the buffer is out of reach for now; to be tried again.
        ray.exceptions.RayActorError: it is dead.
    """

    def __init__(self, service: Any, localise: Callable[[WeightManifest], Awaitable[WeightManifest]]) -> None:
        self._service = service
        self._localise = localise
        self._deliveries: list[tuple[bytes, asyncio.Future[Receipt]]] = []
        self._delivering: asyncio.Task[None] | None = None

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        poll: Poll = await self._call("poll", actor_id, num_slots, loaded_version, wait_s)
        return replace(poll, manifest=await self._localise(poll.manifest)) if poll.manifest else poll

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        return await self._call("heartbeat", actor_id, list(lease_ids))  # type: ignore[no-any-return]

    async def complete(self, trajectory: Trajectory) -> Receipt:
        """Deliveries that come up while a call is under way share the next: a call costs far more than what it carries.

        Raises:
            WireError: see `ReplayBuffer.complete`.
        """
        receipt: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        self._deliveries.append((wire.encode(trajectory), receipt))
        if self._delivering is None or self._delivering.done():
            self._delivering = asyncio.ensure_future(self._deliver())
        return await receipt

    async def _deliver(self) -> None:
        while self._deliveries:
            sent, self._deliveries = self._deliveries, []
            answers: Sequence[Receipt | Exception]
            try:
                answers = await self._call("complete_all", [message for message, _ in sent])
            except Exception as error:  # everybody's
                answers = [error] * len(sent)
            for (_, receipt), answer in zip(sent, answers, strict=True):
                if receipt.done():  # nobody waits for it any more
                    continue
                if isinstance(answer, Exception):
                    receipt.set_exception(answer)
                else:
                    receipt.set_result(answer)

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        return await self._call("fail", lease_id, failure)  # type: ignore[no-any-return]

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._service, method).remote(*arguments)
        except ActorUnavailableError as error:
            raise ConnectionError(f"the buffer cannot be reached: {error}") from error


class RayLearnerLink:
    """`LearnerLink` over Ray. Every call may be repeated, and is while the buffer is out of reach for a moment.

    Raises (every call):
        ray.exceptions.RayActorError: the buffer died, or stayed out of reach.
        ray.exceptions.GetTimeoutError: it did not answer for `ANSWER_LIMIT_S`, in each of several attempts.
    """

    def __init__(self, service: Any) -> None:
        self._service = service

    def take_batch(self, wait_s: float) -> Batch | None:
        answer = self._ask("take_batch", wait_s, limit_s=wait_s + ANSWER_LIMIT_S)
        if answer is None:
            return None
        fields, data = answer
        return Batch(**fields, trajectories=tuple(columns.from_table(columns.from_bytes(data))))

    def announce(self, manifest: WeightManifest) -> None:
        self._ask("announce", manifest)

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        self._ask("finish", batch_id, outcome, version)

    def restore(self, last_finished_batch: BatchId | None, version: WeightVersion) -> WeightVersion:
        # Said twice, it may return a label one higher than it need be.
        return WeightVersion(self._ask("restore", last_finished_batch, version))

    def state(self) -> Mapping[str, Any]:
        return self._ask("state")  # type: ignore[no-any-return]

    def forget_batches_up_to(self, batch_id: BatchId) -> None:
        self._ask("forget_batches_up_to", batch_id)

    def _ask(self, method: str, *arguments: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
        for pause_s in PAUSES_S:
            try:
                return ray.get(getattr(self._service, method).remote(*arguments), timeout=limit_s)
            except (ActorUnavailableError, GetTimeoutError) as error:
                log.warning("the buffer cannot be reached for %s, tried again in %g s: %s", method, pause_s, error)
                time.sleep(pause_s)
        return ray.get(getattr(self._service, method).remote(*arguments), timeout=limit_s)
