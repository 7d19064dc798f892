"""One prompt, one response."""

from __future__ import annotations

from actors.environment import Episode, Step
from common.types import Prompt


class SingleTurn:
    """Ends every episode after the first turn and gives no reward of its own."""

    instant = True

    def start(self, prompt: Prompt, seed: int) -> Episode:
        return _Episode()


class _Episode:
    def step(self, response: str) -> Step:
        return Step(done=True)
