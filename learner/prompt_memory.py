"""What a recipe remembers of each prompt between batches: past rewards, a success rate, or an optimal value.

Part of the learner's state: it is saved with a checkpoint, and a batch without an update leaves it as it was. It holds
a few numbers for each prompt that has been seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from common.algorithm_config import MEMORY_ADVANTAGES, OFFLINE_ADVANTAGES, AlgorithmConfig
from learner.advantages import SuccessRate
from learner.implicit import optimal_value

Visits = Sequence[tuple[str, float]]  # prompt and reward of each trajectory


class PromptMemory:
    """Baselines by prompt. `algorithm.advantage` says which.

    running_mean:  the last `history` rewards
    success_rate:  SPO's Beta distribution, begun from the offline samples
    optimal_value: A*-PO's estimate from the offline samples, fixed afterwards
    smoothed:      DCPO's count of visits, and count, sum and sum of squares of all rewards

    With `offline_samples` = n, the first n rewards of a prompt only fill the memory (`is_offline`).
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self._kind = algorithm.advantage
        self._offline_samples = algorithm.offline_samples if self._kind in OFFLINE_ADVANTAGES else 0
        self._offline: dict[str, list[float]] = {}  # the first rewards of each prompt
        self._numbers: dict[str, list[float]] = {}

    @classmethod
    def for_recipe(cls, algorithm: AlgorithmConfig) -> PromptMemory | None:
        """None for a recipe that remembers nothing."""
        return cls(algorithm) if algorithm.advantage in MEMORY_ADVANTAGES else None

    def is_offline(self, prompts: Sequence[str]) -> list[bool]:
        """For each trajectory of a batch: its prompt has not had its offline samples, so that this one is another."""
        return [len(self._offline.get(prompt, ())) < self._offline_samples for prompt in prompts]

    def baselines(self, prompts: Sequence[str], *, unknown: float) -> Tensor:
        """[S] float64, from rewards of earlier batches; `unknown` for a prompt without any.

        running_mean, success_rate and optimal_value alone.
        """
        return torch.tensor([self._baseline(prompt, unknown) for prompt in prompts], dtype=torch.float64)

    def _baseline(self, prompt: str, unknown: float) -> float:
        if self._kind == "running_mean":
            past = self._numbers.get(prompt)
            return sum(past) / len(past) if past else unknown
        if self._kind == "success_rate":
            return float(self._success_rate(prompt).value)
        assert self._kind == "optimal_value"
        rewards = torch.tensor(self._offline[prompt], dtype=torch.float64)
        return float(optimal_value(rewards, self._algorithm.optimal_value_beta))

    def _success_rate(self, prompt: str) -> SuccessRate:
        if prompt in self._numbers:
            alpha, beta = self._numbers[prompt]
            return SuccessRate(torch.tensor(alpha, dtype=torch.float64), torch.tensor(beta, dtype=torch.float64))
        offline = self._offline.get(prompt, [])
        return SuccessRate.from_trials(torch.tensor(sum(offline), dtype=torch.float64), len(offline))

    def past_moments(self, prompt: str) -> tuple[int, float, float, float]:
        """`smoothed`: earlier visits; count, sum and sum of squares of their rewards."""
        visits, count, total, squares = self._numbers.get(prompt, [0.0, 0.0, 0.0, 0.0])
        return int(visits), count, total, squares

    def learn(self, visits: Visits) -> None:
        """Remember the rewards of a batch. Non-finite rewards and the order of other prompts do not matter."""
        by_prompt: dict[str, list[float]] = {}
        for prompt, reward in visits:
            if math.isfinite(reward):
                by_prompt.setdefault(prompt, []).append(reward)
        for prompt, rewards in by_prompt.items():
            offline = self._offline.setdefault(prompt, []) if self._offline_samples else []
            missing = max(0, self._offline_samples - len(offline))
            offline += rewards[:missing]
            if rewards[missing:]:
                self._learn(prompt, rewards[missing:])

    def _learn(self, prompt: str, rewards: list[float]) -> None:
        if self._kind == "running_mean":
            self._numbers[prompt] = [*self._numbers.get(prompt, []), *rewards][-self._algorithm.history :]
        elif self._kind == "success_rate":
            rate = self._success_rate(prompt)
            alpha, beta = float(rate.alpha), float(rate.beta)
            for reward in rewards:
                alpha = self._algorithm.retention * alpha + reward
                beta = self._algorithm.retention * beta + 1.0 - reward
            self._numbers[prompt] = [alpha, beta]
        elif self._kind == "smoothed":
            visits, count, total, squares = self.past_moments(prompt)
            squares += sum(reward * reward for reward in rewards)
            self._numbers[prompt] = [visits + 1.0, count + len(rewards), total + sum(rewards), squares]

    def state(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {"kind": self._kind, "offline": self._offline, "numbers": self._numbers}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`.

        Raises:
            KeyError: it is of another kind of memory.
        """
        if state["kind"] != self._kind:
            raise KeyError(f"a memory of {state['kind']}, not of {self._kind}")
        self._offline = {prompt: list(rewards) for prompt, rewards in state["offline"].items()}
        self._numbers = {prompt: list(numbers) for prompt, numbers in state["numbers"].items()}
