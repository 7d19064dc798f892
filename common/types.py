"""Records that cross a process boundary. Imports numpy only: no torch, ray or vllm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

import numpy as np
from numpy.typing import NDArray

SampleId = NewType("SampleId", int)  # one trajectory wanted; unique in a run
LeaseId = NewType("LeaseId", int)  # one attempt at a sample; unique in a run
GroupId = NewType("GroupId", int)  # samples of one prompt that a recipe needs together
BatchId = NewType("BatchId", int)
WeightVersion = NewType("WeightVersion", int)  # 0 = starting model, +1 per committed batch


class FinishReason(StrEnum):
    """Why generation ended, as the engine or the environment said, never guessed from the tokens."""

    STOP = "stop"  # the model sampled a stop token, or the environment ended the episode
    LENGTH = "length"  # the token budget or the context was used up: the trajectory is truncated


class SampleState(StrEnum):
    """Where a sample is; see ARCHITECTURE section 5. Every issued sample is in exactly one."""

    QUEUED = "queued"
    LEASED = "leased"
    ASSEMBLING = "assembling"
    READY = "ready"
    IN_TRAINING = "in_training"
    TRAINED = "trained"
    DROPPED = "dropped"


class DropReason(StrEnum):
    """Why a sample left without being trained."""

    STALE = "stale"
    INCOMPLETE_GROUP = "incomplete_group"
    UNSCORABLE = "unscorable"
    EMPTY = "empty"
    OVER_LONG = "over_long"
    FAILED = "failed"
    NO_UPDATE = "no_update"


class BatchOutcome(StrEnum):
    """How the learner ended a batch."""

    COMMITTED = "committed"  # trained, the weight version moved by one
    NO_UPDATE = "no_update"  # gradient not finite or no usable token: nothing moved
    VALUE_WARMUP = "value_warmup"  # only the value model learned: trained, version unchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the data set in one epoch."""

    prompt_id: str  # stable over epochs and restarts, e.g. "sort-digits/17"
    epoch: int
    messages: tuple[Mapping[str, str], ...] = ()  # chat turns with "role" and "content"; empty when `text` is used
    text: str = ""  # plain prompt, used when `messages` is empty
    answer: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict)  # the remaining columns, for rewards and environments


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right and duty of one actor to produce one trajectory."""

    lease_id: LeaseId
    sample_id: SampleId
    attempt: int  # 0 for the first
    group_id: GroupId
    group_size: int  # 1 for single rollouts
    prompt: Prompt
    min_weight_version: WeightVersion  # to be loaded before the first token
    seed: int  # function of (run seed, sample id, attempt)
    time_left_s: float  # the lease is void after this, heartbeats or not


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Tokens [start, stop) that the model sampled in one go."""

    start: int
    stop: int
    finish_reason: FinishReason
    reward: float = 0.0  # given by the environment after this turn; part of Trajectory.reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Durations in seconds."""

    generate_s: float = 0.0
    environment_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One rollout of one prompt: prompt, response and observations as a single stream of T tokens.

    Example (prompt 5 6, sampled 7 8, observation 9, sampled 2)::

        token_ids        5  6  7    8    9  2
        loss_mask        F  F  T    T    F  T
        rollout_logprobs 0  0 -0.1 -0.7  0 -0.2
        weight_versions -1 -1  3    3   -1  4
        turns            [2, 4) and [5, 6)
    """

    sample_id: SampleId
    lease_id: LeaseId
    group_id: GroupId
    prompt_id: str
    epoch: int
    attempt: int
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]; True where the policy sampled the token
    rollout_logprobs: NDArray[np.float32]  # [T], nats, of the distribution sampled from; 0.0 where loss_mask is False
    weight_versions: NDArray[np.int32]  # [T]; -1 where loss_mask is False
    turns: tuple[Turn, ...]
    temperature: float
    reward: float | None  # None: unscorable
    finish_reason: FinishReason
    timings: Timings = Timings()
    metrics: Mapping[str, float] = field(default_factory=dict)  # from the environment or the reward
    error: str = ""  # why the reward is None

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.loss_mask, self.rollout_logprobs, self.weight_versions)
        if len({array.shape for array in arrays}) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"sample {self.sample_id}: per-token arrays must share one shape [T]")
        if self.loss_mask.dtype != np.bool_:
            raise ValueError(f"sample {self.sample_id}: loss_mask must be bool, not {self.loss_mask.dtype}")
        mask = self.loss_mask
        if (self.weight_versions[mask] < 0).any() or (self.weight_versions[~mask] != -1).any():
            raise ValueError(f"sample {self.sample_id}: weight_versions must be >= 0 exactly where loss_mask is True")
        sampled = self.rollout_logprobs[mask]
        if not np.isfinite(sampled).all() or (sampled > 1e-4).any() or (self.rollout_logprobs[~mask] != 0).any():
            raise ValueError(
                f"sample {self.sample_id}: rollout_logprobs must be finite and <= 0, and 0 off the loss_mask"
            )
        covered = np.zeros_like(mask)
        for turn in self.turns:
            if not 0 <= turn.start <= turn.stop <= len(mask) or covered[turn.start : turn.stop].any():
                raise ValueError(
                    f"sample {self.sample_id}: turn [{turn.start}, {turn.stop}) is out of range or overlaps"
                )
            covered[turn.start : turn.stop] = True
        if (covered != mask).any():
            raise ValueError(f"sample {self.sample_id}: turns must cover exactly the sampled tokens")
        if not self.temperature > 0:
            raise ValueError(
                f"sample {self.sample_id}: temperature {self.temperature} must be above 0 to be trained on"
            )

    @property
    def num_sampled(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_prompt_tokens(self) -> int:
        return self.turns[0].start if self.turns else len(self.token_ids)

    @property
    def truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH

    @property
    def oldest_version(self) -> int:
        """Smallest weight version of a sampled token; -1 when nothing was sampled."""
        sampled = self.weight_versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1

    @property
    def newest_version(self) -> int:
        sampled = self.weight_versions[self.loss_mask]
        return int(sampled.max()) if sampled.size else -1

    def staleness(self, current: int) -> int:
        """Versions between the oldest sampled token and `current`; 0 when nothing was sampled."""
        return current - self.oldest_version if self.num_sampled else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a lease ended without a trajectory."""

    reason: DropReason  # FAILED is tried again while attempts are left; OVER_LONG is final
    message: str
    uses_attempt: bool = True  # False: the actor or the engine failed, not the sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Answer to a delivery."""

    accepted: bool
    reason: str = ""  # why not: "late", "duplicate", "unknown lease"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """Samples by state. `issued` is the sum of all the others at every moment."""

    issued: int
    queued: int
    leased: int
    assembling: int
    ready: int
    in_training: int
    trained: int
    dropped: Mapping[DropReason, int]

    @property
    def balanced(self) -> bool:
        held = self.queued + self.leased + self.assembling + self.ready + self.in_training
        return self.issued == held + self.trained + sum(self.dropped.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What the learner trains on next; open until `finish`."""

    batch_id: BatchId
    version: WeightVersion  # the learner's version it was formed at
    trajectories: tuple[Trajectory, ...]  # oldest version at issue first; a group's members are neighbours
    is_last: bool  # the data ended and nothing more can come
    is_tail: bool = False  # smaller than asked for, because the data ended
