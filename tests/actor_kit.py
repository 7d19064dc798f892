"""A rollout worker with fakes all around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from actors.engine import Engine
from actors.environment import Environment, make_environment
from actors.formatting import PromptFormatter
from actors.reward import RewardPool, Score
from actors.rollout import RolloutWorker
from buffer.links import ActorLink
from common.config import DataConfig, EnvironmentConfig, RolloutConfig
from common.types import Prompt
from tests.fakes import TinyTokenizer

TEST_LIMIT_S = 60.0
TOKENIZER = TinyTokenizer()
A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")
T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run with the limit that every case must end in."""
    return asyncio.run(asyncio.wait_for(coroutine, TEST_LIMIT_S))


class InstantRewards(RewardPool):
    """Scores in this process, by a function of the prompt and the response; none: unscorable."""

    def __init__(self, function: Callable[[Prompt, str], float | None]) -> None:
        self._score = function
        self.replaced = 0

    async def start(self) -> None:
        return None

    async def score(self, prompt: Prompt, response: str, sample_id: int | str) -> Score:
        reward = self._score(prompt, response)
        return Score(reward=reward, error="" if reward is not None else f"sample {sample_id}: no reward")

    async def close(self) -> None:
        return None


def make_worker(
    engine: Engine,
    link: ActorLink,
    *,
    actor_id: str = "actor-0",
    rewards: RewardPool | None = None,
    environment: Environment | None = None,
    environment_name: str = "single-turn",
    max_turns: int = 1,
    step_time_limit_s: float = 30.0,
    tokenizer: TinyTokenizer = TOKENIZER,
    heartbeat_s: float = 0.25,
    max_delay_s: float = 30.0,
    link_patience_s: float = 30.0,
    **rollout: Any,
) -> RolloutWorker:
    environment_config = EnvironmentConfig(
        name=environment_name, max_turns=max_turns, step_time_limit_s=step_time_limit_s
    )
    return RolloutWorker(
        actor_id=actor_id,
        engine=engine,
        environment=environment or make_environment(environment_config),
        rewards=rewards,
        formatter=PromptFormatter(tokenizer, DataConfig()),
        link=link,
        rollout=RolloutConfig(**{"slots": 4, "max_new_tokens": 8, **rollout}),
        environment_config=environment_config,
        heartbeat_s=heartbeat_s,
        max_delay_s=max_delay_s,
        link_patience_s=link_patience_s,
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
    """Wait; the limit of the test ends it."""
    while not condition():
        await asyncio.sleep(0.005)
