"""The buffer's own rows: what it knows of each sample, unit and batch, and what a durable store keeps of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from common.types import (
    BatchId,
    BatchOutcome,
    DropReason,
    GroupId,
    LeaseId,
    Prompt,
    SampleId,
    SampleState,
    WeightVersion,
)

START = WeightVersion(0)


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One trajectory wanted. `state` is changed by the ledger alone."""

    sample_id: SampleId
    unit_id: GroupId
    state: SampleState = SampleState.QUEUED
    drop_reason: DropReason | None = None
    attempt: int = 0  # attempts used up
    lease_id: LeaseId | None = None  # the current lease, or the one it was delivered under; None while queued
    actor_id: str = ""
    version_at_issue: int = -1  # learner's version when that lease was issued
    issued_at: float = 0.0  # clock seconds; these two start anew when a buffer starts from its store
    heard_at: float = 0.0
    oldest_version: int = -1  # of the sampled tokens, from the delivery
    newest_version: int = -1
    num_sampled: int = 0  # tokens
    duration_s: float = 0.0  # lease to delivery
    reward: float = 0.0
    size_bytes: int = 0


class Stage(StrEnum):
    """Where a unit is."""

    ASSEMBLING = "assembling"  # a member is queued or leased
    READY = "ready"
    IN_TRAINING = "in_training"
    GONE = "gone"  # trained or dropped


@dataclass(slots=True, kw_only=True, eq=False)
class Unit:
    """A single rollout or a whole group: admitted, ordered, trained and dropped as one; always counts its full size."""

    unit_id: GroupId
    position: int  # of its prompt in the prompt source
    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    stage: Stage = Stage.ASSEMBLING
    converted: bool = False  # trained as single rollouts
    first_delivery_at: float | None = None  # clock seconds
    order: tuple[int, int] | None = None  # (version at issue, lease number) of the oldest member; None: none is leased

    @property
    def size(self) -> int:
        return len(self.samples)


@dataclass(slots=True, kw_only=True, eq=False)
class BatchRecord:
    """A batch, from the moment it is formed until the oldest retained checkpoint covers it."""

    batch_id: BatchId
    version: WeightVersion  # the learner's when it was formed
    unit_ids: tuple[GroupId, ...]
    is_last: bool
    is_tail: bool
    outcome: BatchOutcome | None = None  # None while open
    finished_version: WeightVersion | None = None


@dataclass(slots=True, kw_only=True)
class Totals:
    """Samples with one outcome, by length and duration."""

    count: int = 0
    tokens: int = 0  # sampled
    seconds: float = 0.0  # lease to delivery
    max_staleness: int = 0
    by_length: Counter[int] = field(default_factory=Counter)  # key e: up to 2^e sampled tokens
    by_duration: Counter[int] = field(default_factory=Counter)  # key e: up to 2^e seconds

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.count if self.count else 0.0

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count if self.count else 0.0


@dataclass(slots=True, kw_only=True)
class Losses:
    """Units that were lost before they could be trained, since the last usable trajectory."""

    failed: int = 0  # a member at least was lost for another reason than its prompt's length
    over_long: int = 0  # the prompt is too long: nothing is broken
    first_failure: str = ""  # of a sample
    first_over_long: str = ""
    since_position: int = 0  # of the prompt source's cursor

    @property
    def first(self) -> str:
        return self.first_failure or self.first_over_long


@dataclass(slots=True, kw_only=True)
class Events:
    """Things that happened, each counted from the start of the run."""

    late_deliveries: int = 0  # under a lease that was void
    duplicate_deliveries: int = 0  # under a lease that had been delivered
    unknown_deliveries: int = 0  # under a lease that was never issued
    lost_actors: int = 0
    lost_leases: int = 0  # back in the pool because their actor died or fell silent, or gave them back unharmed
    expired_leases: int = 0  # past their deadline
    failed_attempts: int = 0  # failures of samples, deadlines and late members included
    retries: int = 0  # of these, tried again
    straggler_retries: int = 0
    closed_groups: int = 0
    converted_groups: int = 0
    uninformative_groups: int = 0  # whole, and all rewards equal
    stale_units: int = 0  # dropped as too stale
    returned_by_restore: int = 0  # samples ready again because their batch is not in the restored weights


@dataclass(slots=True, kw_only=True)
class RunState:
    """Everything that is neither a sample, a unit nor a batch."""

    group_size: int
    prompts: dict[str, int] = field(default_factory=dict)  # PromptSource.state
    version: WeightVersion = START  # the learner's
    highest_version: WeightVersion = START  # ever published
    next_sample: int = 0
    next_lease: int = 0
    next_unit: int = 0
    next_batch: int = 0
    forgotten_up_to: BatchId | None = None  # no checkpoint from before this batch can be restored
    pending_positions: list[int] = field(default_factory=list)  # prompts taken up again ahead of the cursor
    counts: dict[SampleState, int] = field(default_factory=lambda: dict.fromkeys(SampleState, 0))
    dropped: dict[DropReason, int] = field(default_factory=lambda: dict.fromkeys(DropReason, 0))
    issued: int = 0
    sampled: Totals = field(default_factory=Totals)  # usable trajectories delivered
    trained: Totals = field(default_factory=Totals)
    lost: dict[DropReason, Totals] = field(default_factory=lambda: {reason: Totals() for reason in DropReason})
    events: Events = field(default_factory=Events)
    batches: dict[BatchOutcome, int] = field(default_factory=lambda: dict.fromkeys(BatchOutcome, 0))  # finished
    no_update_in_a_row: int = 0
    losses: Losses = field(default_factory=Losses)
    failed_prompts: list[str] = field(default_factory=list)  # the latest that were dropped as failed
    beyond_bound: dict[str, int] = field(
        default_factory=dict
    )  # prompt -> times dropped as stale since it was last trained


@dataclass(slots=True, kw_only=True)
class StoredRun:
    """A run as it was left; the units carry their samples."""

    run: RunState
    units: dict[GroupId, Unit]
    batches: dict[BatchId, BatchRecord]
