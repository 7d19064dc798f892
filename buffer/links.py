"""What actors and the learner may ask of the buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.types import Batch, BatchId, BatchOutcome, Failure, Lease, LeaseId, Receipt, Trajectory, WeightVersion
from common.weights import WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """Answer to an actor that asked for work."""

    leases: tuple[Lease, ...] = ()
    manifest: WeightManifest | None = None  # the newest publication, when it is newer than the actor's version
    closing: bool = False  # the run is over: finish nothing, leave


class ActorLink(Protocol):
    """The buffer as a rollout actor sees it."""

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        """Up to `num_slots` leases; waits up to `wait_s` while there is neither a lease nor a newer publication.

        `closing` when the run is over, and for an actor that was reported dead.
        """
        ...

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        """Say that the actor lives; returns those of its leases that are void, to be given up."""
        ...

    async def complete(self, trajectory: Trajectory) -> Receipt:
        """Deliver. Safe to repeat: a second delivery of the same lease is refused."""
        ...

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        """Give a lease back without a trajectory."""
        ...


class LearnerLink(Protocol):
    """The buffer as the learner sees it. Calls block."""

    def take_batch(self, wait_s: float) -> Batch | None:
        """The open batch, or the next; none when `wait_s` passed without one."""
        ...

    def announce(self, manifest: WeightManifest) -> None:
        """Make a publication known to the actors; comes before the `finish` that moves the version to it."""
        ...

    def finish(self, batch_id: BatchId, outcome: BatchOutcome, version: WeightVersion) -> None:
        """End the open batch. Safe to repeat with the same arguments."""
        ...

    def restore(self, last_finished_batch: BatchId | None, version: WeightVersion) -> WeightVersion:
        """Say that the learner starts from a checkpoint at `version`, or anew.

        Samples of batches after `last_finished_batch` are ready again. Returns the version to publish under.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must hold so that a new buffer goes on with the prompts that follow."""
        ...

    def forget_batches_up_to(self, batch_id: BatchId) -> None:
        """Say that the oldest retained checkpoint covers these batches: their payloads may go."""
        ...
