"""Actors and a real replay buffer, all in one process: lost and failed members, late results, whole small runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from actors.engine import GenerationRequest
from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer, ReplaySettings
from common.errors import EngineDeadError
from common.types import BatchOutcome, DropReason, Trajectory, WeightVersion
from tests.actor_kit import A, InstantRewards, make_worker, run
from tests.fakes import EOS, LocalLink, Scripted, ScriptedEngine, make_manifest, make_prompt

GROUP = 4


@dataclass
class Run:
    """A small run: what was trained, and the state it ended in."""

    buffer: ReplayBuffer
    engines: list[ScriptedEngine]
    trained: list[Trajectory] = field(default_factory=list)
    batches: int = 0

    def trained_ids(self) -> list[int]:
        return sorted(trajectory.sample_id for trajectory in self.trained)


def sample_of(request: GenerationRequest) -> int:
    return int(request.request_id.partition(".")[0])


async def small_run(
    script: Callable[[GenerationRequest], Scripted],
    *,
    num_prompts: int = 8,
    num_actors: int = 1,
    group_size: int = GROUP,
    batch_size: int = GROUP,
    bound: int = 0,
    lease_deadline_s: float = 30.0,
    max_attempts: int = 2,
    epochs: int = 1,
    heartbeat_s: float = 0.25,
) -> Run:
    """Every prompt `epochs` times, with a learner that commits each batch at once."""
    settings = ReplaySettings(
        seed=0,
        batch_size=batch_size,
        group_size=group_size,
        staleness_bound=bound,
        lease_deadline_s=lease_deadline_s,
        heartbeat_s=30.0,
        max_attempts=max_attempts,
        max_lost_in_a_row=16,
    )
    prompts = [make_prompt(number=number) for number in range(num_prompts)]
    buffer = ReplayBuffer(settings, PromptSource(prompts, seed=0, epochs=epochs), time.monotonic)
    link = LocalLink(buffer)
    link.manifest = make_manifest(0)
    engines = [ScriptedEngine(script) for _ in range(num_actors)]
    workers = [
        make_worker(
            engine,
            link,
            actor_id=f"actor-{index}",
            rewards=InstantRewards(lambda prompt, response: 1.0),
            heartbeat_s=heartbeat_s,
            slots=8,
        )
        for index, engine in enumerate(engines)
    ]
    result = Run(buffer, engines)
    await asyncio.gather(learn(result, link), *(worker.run() for worker in workers))
    assert buffer.ledger().balanced
    return result


async def learn(result: Run, link: LocalLink) -> None:
    """Commit every batch and announce the next version, until the data or the run ends."""
    buffer, version = result.buffer, 0
    while not buffer.end_of_data and buffer.fatal is None:
        batch = buffer.take_batch()
        if batch is None:
            await asyncio.sleep(0.01)
            continue
        result.trained += batch.trajectories
        result.batches += 1
        version += 1
        link.manifest = make_manifest(version)
        buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(version))
    link.closing = True


def generated(result: Run) -> set[int]:
    return {sample_of(request) for engine in result.engines for request in engine.requests}


MEMBERS_OF_3 = [12, 13, 14, 15]


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize(
    ("lost", "hangs", "reason"),
    [
        ([14], True, DropReason.FAILED),  # (a) never answers
        ([14], False, DropReason.FAILED),  # (b) raises
        ([12, 14, 15], False, DropReason.INCOMPLETE_GROUP),  # (c) raises on three members
    ],
)
def test_lost_members_of_one_group_do_not_stop_the_others(
    bound: int, lost: list[int], hangs: bool, reason: DropReason
) -> None:
    """F-17 (a) to (c): group 3 of 8."""

    def script(request: GenerationRequest) -> Scripted:
        if sample_of(request) not in lost:
            return Scripted()
        return Scripted(hangs=True) if hangs else Scripted(error=ValueError("no answer for this one"))

    result = run(small_run(script, bound=bound, lease_deadline_s=1.0))
    others = [n for n in range(32) if n not in MEMBERS_OF_3]
    rest = [n for n in MEMBERS_OF_3 if n not in lost] if len(lost) == 1 else []
    counts = result.buffer.ledger()
    if bound and hangs:  # the others go on meanwhile: what is left of group 3 waits too long for its fourth member
        assert result.trained_ids() in (others, sorted([*others, *rest]))
        assert counts.dropped[DropReason.STALE] == 31 - len(result.trained)
    else:
        assert result.trained_ids() == sorted([*others, *rest])
    assert generated(result) == set(range(32))
    assert counts.dropped[reason] == (4 - len(lost) if reason is DropReason.INCOMPLETE_GROUP else len(lost))
    assert counts.trained == len(result.trained)
    for group_id in range(8):
        assert len({t.prompt_id for t in result.trained if t.group_id == group_id}) <= 1


def test_a_group_whose_member_is_lost_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """F-17: an attempt that raises is logged with sample and prompt."""

    def script(request: GenerationRequest) -> Scripted:
        return Scripted(error=ValueError("odd")) if sample_of(request) == 14 else Scripted()

    result = run(small_run(script, num_prompts=4))
    (failed,) = {t.prompt_id for t in result.trained if t.group_id == 3}
    assert f"sample 14 (prompt {failed}): ValueError: odd" in caplog.text


def test_a_run_in_which_every_attempt_raises_ends_with_that_error() -> None:
    """F-17 (d)."""

    def script(request: GenerationRequest) -> Scripted:
        return Scripted(error=ValueError("nothing works here"))

    result = run(small_run(script))
    assert "nothing works here" in (result.buffer.fatal or "")
    assert result.trained == []


def test_an_engine_that_is_dead_from_the_first_call_ends_the_actor_with_its_error() -> None:
    """F-17 (d), F-05: nothing loops."""

    def script(request: GenerationRequest) -> Scripted:
        return Scripted(error=EngineDeadError("no such kernel"))

    with pytest.raises(EngineDeadError, match="no such kernel"):
        run(small_run(script))


def test_a_late_result_after_a_second_hand_out_is_not_counted_twice() -> None:
    """F-18: the first attempt outlives its deadline and answers all the same, the second answers at once."""
    attempts: Counter[int] = Counter()

    def script(request: GenerationRequest) -> Scripted:
        attempts[sample_of(request)] += 1
        slow = sample_of(request) == 2 and attempts[2] == 1
        return Scripted(token_ids=(A, EOS), delay_s=2.0 if slow else 0.01)

    # Heartbeats too rare to call the first attempt off.
    result = run(small_run(script, num_prompts=4, bound=1, lease_deadline_s=1.0, max_attempts=3, heartbeat_s=500.0))
    assert attempts[2] == 2
    assert result.trained_ids() == list(range(16))
    assert [t.attempt for t in result.trained if t.sample_id == 2] == [1]


@pytest.mark.parametrize(("bound", "num_actors"), [(0, 1), (0, 2), (2, 2)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_prompt_is_trained_once_an_epoch_and_the_tail_is_not_lost(
    bound: int, num_actors: int, epochs: int
) -> None:
    """F-23: 10 prompts in batches of 4."""
    result = run(
        small_run(
            lambda request: Scripted(delay_s=0.002 * (sample_of(request) % 3)),
            num_prompts=10,
            num_actors=num_actors,
            group_size=1,
            bound=bound,
            epochs=epochs,
        )
    )
    seen = Counter((t.prompt_id, t.epoch) for t in result.trained)
    assert seen == {(f"test/{number}", epoch): 1 for number in range(10) for epoch in range(epochs)}
    assert result.batches == -(-10 * epochs // 4)


def test_members_of_a_group_have_seeds_of_their_own_whoever_generates_them() -> None:
    """F-31."""

    def seeds(num_actors: int) -> dict[int, int]:
        result = run(small_run(lambda request: Scripted(), num_prompts=3, num_actors=num_actors))
        return {sample_of(r): r.seed for engine in result.engines for r in engine.requests}

    one, two = seeds(1), seeds(2)
    assert one == two
    assert len(set(one.values())) == 12


def test_with_bound_0_every_batch_is_generated_by_the_weights_before_it() -> None:
    result = run(small_run(lambda request: Scripted(), num_prompts=5, num_actors=2))
    for batch in range(5):
        members = result.trained[batch * GROUP : (batch + 1) * GROUP]
        assert {(t.oldest_version, t.newest_version) for t in members} == {(batch, batch)}
