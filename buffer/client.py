"""The buffer's interface over Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from buffer.links import ActorLink, LearnerLink, Poll
from common import columns, wire
from common.types import Batch, BatchId, BatchOutcome, Failure, LeaseId, Receipt, Trajectory, WeightVersion
from common.weights import WeightManifest

__all__ = ["ActorLink", "LearnerLink", "Poll", "RayActorLink", "RayLearnerLink"]

ANSWER_LIMIT_S = 120.0  # a buffer that does not answer for this long is taken for dead


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

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        poll: Poll = await self._call("poll", actor_id, num_slots, loaded_version, wait_s)
        return replace(poll, manifest=await self._localise(poll.manifest)) if poll.manifest else poll

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        return await self._call("heartbeat", actor_id, list(lease_ids))  # type: ignore[no-any-return]

    async def complete(self, trajectory: Trajectory) -> Receipt:
        return await self._call("complete", wire.encode(trajectory))  # type: ignore[no-any-return]

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        return await self._call("fail", lease_id, failure)  # type: ignore[no-any-return]

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._service, method).remote(*arguments)
        except ActorUnavailableError as error:
            raise ConnectionError(f"the buffer cannot be reached: {error}") from error


class RayLearnerLink:
    """`LearnerLink` over Ray.

    Raises (every call):
        ray.exceptions.RayActorError: the buffer died.
        ray.exceptions.GetTimeoutError: it did not answer for `ANSWER_LIMIT_S`.
    """

    def __init__(self, service: Any) -> None:
        self._service = service

    def take_batch(self, wait_s: float) -> Batch | None:
        answer = ray.get(self._service.take_batch.remote(wait_s), timeout=wait_s + ANSWER_LIMIT_S)
        if answer is None:
            return None
        fields, data = answer
        return Batch(**fields, trajectories=tuple(columns.from_table(columns.from_bytes(data))))

    def announce(self, manifest: WeightManifest) -> None:
        ray.get(self._service.announce.remote(manifest), timeout=ANSWER_LIMIT_S)

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        ray.get(self._service.finish.remote(batch_id, outcome, version), timeout=ANSWER_LIMIT_S)

    def restore(self, last_finished_batch: BatchId | None, version: WeightVersion) -> WeightVersion:
        label = ray.get(self._service.restore.remote(last_finished_batch, version), timeout=ANSWER_LIMIT_S)
        return WeightVersion(label)

    def state(self) -> Mapping[str, Any]:
        return ray.get(self._service.state.remote(), timeout=ANSWER_LIMIT_S)  # type: ignore[no-any-return]

    def forget_batches_up_to(self, batch_id: BatchId) -> None:
        ray.get(self._service.forget_batches_up_to.remote(batch_id), timeout=ANSWER_LIMIT_S)
