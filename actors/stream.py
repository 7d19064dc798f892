"""The tokens of one episode as a stream that only grows at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actors.engine import Generation
from common.types import Turn


class TokenStream:
    """Prompt, then turns of the model and observations in the order they came.

    What is trained is known from lengths, never from the values of ids: a model may use one id to pad and to stop.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = list(prompt_ids)
        self.turns: list[Turn] = []
        self._generations: list[Generation] = []

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    def add_given(self, ids: Sequence[int]) -> None:
        """Append ids that the model did not sample."""
        self.ids.extend(ids)

    def add_turn(self, generation: Generation) -> None:
        """Append what the model sampled."""
        start = len(self.ids)
        self.ids.extend(generation.token_ids.tolist())
        self.turns.append(Turn(start=start, stop=len(self.ids), finish_reason=generation.finish_reason))
        self._generations.append(generation)

    def reward_turn(self, reward: float) -> None:
        """Give the last turn its reward."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]:
        """Token ids, loss mask, log-probs and weight versions, each [T]; see `common.types.Trajectory`."""
        total = len(self.ids)
        mask, logprobs = np.zeros(total, np.bool_), np.zeros(total, np.float32)
        versions = np.full(total, -1, np.int32)
        for turn, generation in zip(self.turns, self._generations, strict=True):
            span = slice(turn.start, turn.stop)
            mask[span] = True
            logprobs[span] = generation.logprobs
            versions[span] = generation.weight_versions
        return np.array(self.ids, np.int32), mask, logprobs, versions
