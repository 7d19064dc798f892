"""What an actor does around its engine: leases, deliveries, weights, evaluation, failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from actors.engine import Engine, GenerationRequest
from actors.environment import make_environment
from actors.formatting import PromptFormatter
from actors.reward import RewardPool
from actors.rollout import RolloutWorker
from buffer.links import ActorLink
from common.config import DataConfig, EnvironmentConfig, RolloutConfig
from common.errors import CanaryError, EngineDeadError, WeightUpdateError
from common.types import DropReason, FinishReason, LeaseId
from tests.fakes import EOS, Scripted, ScriptedEngine, ScriptedLink, TinyTokenizer, make_lease, make_prompt

TEST_LIMIT_S = 60.0
TOKENIZER = TinyTokenizer()
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")


def run(coroutine: Any) -> Any:
    """Run with the limit that every case must end in."""
    return asyncio.run(asyncio.wait_for(coroutine, TEST_LIMIT_S))


def make_worker(
    engine: Engine,
    link: ActorLink,
    *,
    rewards: RewardPool | None = None,
    environment: Any = None,
    environment_name: str = "single-turn",
    max_turns: int = 1,
    step_time_limit_s: float = 30.0,
    heartbeat_s: float = 0.25,
    max_delay_s: float = 30.0,
    **rollout: Any,
) -> RolloutWorker:
    environment_config = EnvironmentConfig(
        name=environment_name, max_turns=max_turns, step_time_limit_s=step_time_limit_s
    )
    return RolloutWorker(
        actor_id="actor-0",
        engine=engine,
        environment=environment or make_environment(environment_config),
        rewards=rewards,
        formatter=PromptFormatter(TOKENIZER, DataConfig()),
        link=link,
        rollout=RolloutConfig(**{"slots": 4, "max_new_tokens": 8, **rollout}),
        environment_config=environment_config,
        heartbeat_s=heartbeat_s,
        max_delay_s=max_delay_s,
    )


@contextlib.asynccontextmanager
async def running(worker: RolloutWorker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(worker.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_a_lease_becomes_a_delivered_trajectory_with_the_engines_own_ids() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(Scripted(token_ids=(A, EOS), logprob=-0.25))
        link = ScriptedLink([make_lease(3)])
        pool = RewardPool("exact-match", "", processes=1, time_limit_s=10)
        worker = make_worker(engine, link, rewards=pool, temperature=0.7)
        await worker.start()
        try:
            await worker.run()
        finally:
            await worker.close()
        (trajectory,) = link.delivered
        prompt = TOKENIZER.encode("say a")
        assert trajectory.token_ids.tolist() == [*prompt, A, EOS]
        assert trajectory.loss_mask.tolist() == [False] * 5 + [True, True]
        assert trajectory.rollout_logprobs.tolist() == [0.0] * 5 + [-0.25, -0.25]
        assert trajectory.weight_versions.tolist() == [-1] * 5 + [0, 0]
        assert (trajectory.reward, trajectory.finish_reason, trajectory.temperature) == (1.0, FinishReason.STOP, 0.7)
        assert (trajectory.sample_id, trajectory.lease_id, trajectory.group_id) == (3, 1003, 3)
        assert engine.started
        assert engine.closed
        assert worker.status().delivered == 1

    run(scenario())
