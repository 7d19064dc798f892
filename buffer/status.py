"""The buffer seen from outside: gauges for metrics, a line for the log, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from buffer import groups
from buffer.pool import UnitPool
from buffer.records import Events, RunState, Stage, Totals, Unit
from buffer.settings import ReplaySettings
from common.types import BatchId, BatchOutcome, DropReason, LedgerCounts, SampleState, WeightVersion

NAMED_PROMPTS = 10  # in one line of the log


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStatus:
    """The buffer at one moment. Counters run from the start of the run; a restore takes back what it brings back."""

    counts: LedgerCounts
    version: int  # the learner's
    highest_version: int  # ever published
    live_samples: int  # units that were neither trained nor dropped, with their full size
    ready_units: int
    admission_limit: int  # samples
    admission_room: int  # samples that may be admitted now
    num_actors: int  # alive
    oldest_lease_s: float  # how long the oldest current lease has been out; 0: none is
    held_bytes: int  # delivered trajectories of live units
    open_batch: int | None
    batches: Mapping[BatchOutcome, int]  # finished
    batches_kept: int  # finished batches that a restore may bring back
    prompts_left: int | None  # still to be admitted; None: endless
    events: Events
    sampled: Totals  # usable trajectories delivered
    trained: Totals
    dropped: Mapping[DropReason, Totals]
    no_update_in_a_row: int
    failed_prompts: tuple[str, ...]  # the latest that were dropped as failed
    beyond_bound: Mapping[str, int]  # prompt -> times dropped as stale since it was last trained: cannot meet the bound
    fatal: str | None  # why the run cannot make progress
    end_of_data: bool  # nothing is left to be trained and nothing can come

    @property
    def length_bias(self) -> float:
        """Mean length of what was trained over that of what was delivered; below 1 long ones lose. 1 without either."""
        if not self.trained.tokens or not self.sampled.tokens:
            return 1.0
        return self.trained.mean_tokens / self.sampled.mean_tokens


def copy_totals(totals: Totals) -> Totals:
    return Totals(
        count=totals.count,
        tokens=totals.tokens,
        seconds=totals.seconds,
        max_staleness=totals.max_staleness,
        by_length=+totals.by_length,
        by_duration=+totals.by_duration,
    )


def copy_events(events: Events) -> Events:
    return Events(**asdict(events))


def describe_missing(pool: UnitPool, settings: ReplaySettings, now: float, *, num_actors: int, room: int) -> str:
    """What keeps the next batch from being formed: the oldest unit that is not whole, by name, and who holds it."""
    line = f"{pool.num_ready} of {settings.units_per_batch} units are ready"
    waiting = next((unit for unit in pool.oldest_first() if unit.stage is Stage.ASSEMBLING), None)
    if waiting is not None:
        members = "; ".join(_describe_member(unit=waiting, index=index, now=now) for index in _missing_members(waiting))
        name = f"group {waiting.unit_id}" if waiting.size > 1 else f"rollout {waiting.unit_id}"
        line += f"; the oldest missing is {name} (prompt {waiting.prompt.prompt_id}): {members}"
    if room:
        line += f"; {room} more may be leased"
    return line if num_actors else f"{line}; no actor is alive"


def _missing_members(unit: Unit) -> list[int]:
    return [index for index, sample in enumerate(unit.samples) if sample.state in groups.OUTSTANDING]


def _describe_member(unit: Unit, index: int, now: float) -> str:
    sample = unit.samples[index]
    place = f"sample {sample.sample_id}" + (f" (member {index})" if unit.size > 1 else "")
    if sample.state is SampleState.QUEUED:
        return f"{place} waits for an actor, attempt {sample.attempt}"
    return f"{place} with actor {sample.actor_id} for {now - sample.issued_at:.1f} s, attempt {sample.attempt}"


def describe_stale(run: RunState, bound: int) -> str:
    """Which prompts do not meet the staleness bound, and whether they are the long or the slow ones."""
    latest = list(reversed(run.beyond_bound))
    names = ", ".join(latest[:NAMED_PROMPTS]) + (", ..." if len(latest) > NAMED_PROMPTS else "")
    stale, trained = run.lost[DropReason.STALE], run.trained
    return (
        f"{run.events.stale_units} units were too stale to be trained (staleness.bound = {bound}); prompts without a "
        f"trained rollout since, {len(latest)}, the latest first: {names}; stale of stale and trained samples, by "
        f"sampled tokens: {_shares(stale.by_length, trained.by_length)}; by seconds: "
        f"{_shares(stale.by_duration, trained.by_duration)}"
    )


def _shares(stale: Counter[int], trained: Counter[int]) -> str:
    """`3 of 40 up to 16, 5 of 6 up to 32`."""
    both = stale + trained
    return ", ".join(f"{stale[e]} of {both[e]} up to {2**e}" for e in sorted(both))


# A run that goes on without its store


def state_of(run: RunState, live: Iterable[Unit], last_finished: BatchId | None) -> dict[str, Any]:
    """Plain numbers, texts, lists and maps; see `ReplayBuffer.state`."""
    counts = {state.value: run.counts[state] for state in (SampleState.TRAINED,)}
    return {
        "prompts": dict(run.prompts),
        "pending_positions": sorted(unit.position for unit in live) + run.pending_positions,
        "version": run.version,
        "highest_version": run.highest_version,
        "next": [run.next_sample, run.next_lease, run.next_unit, run.next_batch],
        "last_finished": last_finished,
        "counts": counts,
        "dropped": {reason.value: count for reason, count in run.dropped.items()},
        "group_size": run.group_size,
    }


def run_from_state(state: Mapping[str, Any]) -> RunState:
    """Inverse of `state_of`, but for the samples that were live: their prompts are admitted again."""
    next_sample, next_lease, next_unit, next_batch = state["next"]
    run = RunState(
        group_size=state["group_size"],
        prompts=dict(state["prompts"]),
        version=WeightVersion(state["version"]),
        highest_version=WeightVersion(state["highest_version"]),
        next_sample=next_sample,
        next_lease=next_lease,
        next_unit=next_unit,
        next_batch=next_batch,
        forgotten_up_to=state["last_finished"],
        pending_positions=list(state["pending_positions"]),
    )
    run.counts.update({SampleState(name): count for name, count in state["counts"].items()})
    run.dropped.update({DropReason(name): count for name, count in state["dropped"].items()})
    run.issued = sum(run.counts.values()) + sum(run.dropped.values())
    run.losses.since_position = run.prompts["position"]
    return run
