"""One episode: turns of the model, steps of the environment, and the reward."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.engine import Engine, Generation, GenerationRequest
from actors.environment import Environment, Episode, Step, StepTimeoutError, make_caller
from actors.formatting import PromptFormatter
from actors.reward import RewardPool
from actors.stream import TokenStream
from common.config import EnvironmentConfig, RolloutConfig
from common.types import FinishReason, Prompt, Timings, Turn

T = TypeVar("T")


class OverLongPromptError(Exception):
    """The prompt has more tokens than `rollout.max_prompt_tokens`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """What became of one prompt. Arrays as in `common.types.Trajectory`."""

    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    rollout_logprobs: NDArray[np.float32]  # [T]
    weight_versions: NDArray[np.int32]  # [T]
    turns: tuple[Turn, ...]
    finish_reason: FinishReason
    reward: float | None  # None: unscorable
    error: str  # why, naming the sample
    timings: Timings
    metrics: dict[str, float]


@dataclass(slots=True)
class _Progress:
    """An episode so far."""

    name: str
    stream: TokenStream
    finish_reason: FinishReason = FinishReason.STOP
    response: str = ""  # text of the last turn
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate_s": 0.0, "environment_s": 0.0, "score_s": 0.0})

    async def timed(self, what: str, call: Awaitable[T]) -> T:
        started = time.perf_counter()
        try:
            return await call
        finally:
            self.seconds[what] += time.perf_counter() - started


class EpisodePlayer:
    """Plays episodes on one engine.

    Args:
        rewards: scoring processes; none: the reward is the sum of the environment's.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        environment: Environment,
        rewards: RewardPool | None,
        formatter: PromptFormatter,
        rollout: RolloutConfig,
        environment_config: EnvironmentConfig,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._rewards = rewards
        self._formatter = formatter
        self._rollout = rollout
        self._max_turns = environment_config.max_turns
        self._caller = make_caller(environment, environment_config.step_time_limit_s)

    async def play(
        self,
        prompt: Prompt,
        *,
        name: str,
        temperature: float,
        seed: int,
        on_generated: Callable[[], None] | None = None,
    ) -> Rollout:
        """One episode. Its reward is the sum of the environment's rewards and the score of the last turn's text.

        Args:
            name: of the sample, for messages.
            temperature: 0: greedy, for evaluation.
            seed: decides the sampling of every turn, and is handed to the environment.
            on_generated: called when the engine is needed no more.

        Raises:
            OverLongPromptError: nothing was generated.
            EngineDeadError, CanaryError: see `Engine.generate`.
            ConfigError, ResourceError: see `PromptFormatter.prompt_ids` and `RewardPool.score`.
            StuckEnvironmentError: see `actors.environment.EnvironmentCaller.call`.
            Exception: whatever else the environment or the engine raised for this prompt.
        """
        prompt_ids = self._formatter.prompt_ids(prompt)
        limit = self._rollout.max_prompt_tokens
        if len(prompt_ids) > limit:
            raise OverLongPromptError(
                f"prompt {prompt.prompt_id} has {len(prompt_ids)} tokens, more than rollout.max_prompt_tokens = {limit}"
            )
        progress = _Progress(name, TokenStream(prompt_ids))
        episode = await progress.timed("environment_s", self._caller.call(self._environment.start, prompt, seed))
        try:
            await self._take_turns(prompt, episode, progress, temperature, seed)
        except StepTimeoutError as error:
            progress.error = f"sample {name}: {error}"
        if on_generated is not None:
            on_generated()
        reward = None if progress.error else await self._reward(prompt, progress)
        token_ids, loss_mask, rollout_logprobs, weight_versions = progress.stream.arrays()
        return Rollout(
            token_ids=token_ids,
            loss_mask=loss_mask,
            rollout_logprobs=rollout_logprobs,
            weight_versions=weight_versions,
            turns=tuple(progress.stream.turns),
            finish_reason=progress.finish_reason,
            reward=reward,
            error=progress.error,
            timings=Timings(**progress.seconds),
            metrics=progress.metrics,
        )

    async def _take_turns(
        self, prompt: Prompt, episode: Episode, progress: _Progress, temperature: float, seed: int
    ) -> None:
        """Until the environment is done, or the model, the turns or the tokens are at their limit: then truncated."""
        stream = progress.stream
        for turn in range(self._max_turns):
            generation = await progress.timed("generate_s", self._generate(progress, turn, temperature, seed))
            stream.add_turn(generation)
            progress.response = self._formatter.text(generation.token_ids.tolist())
            step = await progress.timed("environment_s", self._caller.call(episode.step, progress.response))
            _note(step, progress)
            if generation.finish_reason is FinishReason.LENGTH:  # cut off: there is no end of turn to go on from
                break
            if step.done or not generation.token_ids.size:
                return
            observation = self._formatter.observation_ids(prompt, step.observation, stream.ids[-1])
            if turn + 1 == self._max_turns or len(stream) + len(observation) >= self._rollout.max_tokens:
                break
            stream.add_given(observation)
        progress.finish_reason = FinishReason.LENGTH

    async def _generate(self, progress: _Progress, turn: int, temperature: float, seed: int) -> Generation:
        stream = progress.stream
        request = GenerationRequest(
            request_id=f"{progress.name}.{turn}",
            prompt_ids=tuple(stream.ids),
            max_new_tokens=min(self._rollout.max_new_tokens, self._rollout.max_tokens - len(stream)),
            temperature=temperature,
            seed=derive_seed(seed, turn),
            stop_token_ids=self._formatter.stop_token_ids,
        )
        return await self._engine.generate(request)

    async def _reward(self, prompt: Prompt, progress: _Progress) -> float | None:
        if self._rewards is None:
            return progress.stream.reward
        score = await progress.timed("score_s", self._rewards.score(prompt, progress.response, progress.name))
        progress.error = score.error
        progress.metrics |= score.metrics
        return None if score.reward is None else progress.stream.reward + score.reward


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2^63) from others: equal for equal parts, unrelated for different ones."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _note(step: Any, progress: _Progress) -> None:
    """Take over reward and metrics of a step; a reward that is not finite makes the sample unscorable.

    Raises:
        TypeError: the environment returned something else than a `Step`.
    """
    if not isinstance(step, Step):
        raise TypeError(f"the environment's step returned {type(step).__name__}, not actors.environment.Step")
    progress.metrics |= {name: float(value) for name, value in step.metrics.items()}
    if math.isfinite(step.reward):
        progress.stream.reward_turn(float(step.reward))
    else:
        progress.error = f"sample {progress.name}: the environment's reward is {step.reward}"
