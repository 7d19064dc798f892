"""A toy of two turns: whoever is wrong is asked again."""

from __future__ import annotations

from actors.environment import Episode, Step
from common.types import Prompt

FIRST_REWARD = 1.0
SECOND_REWARD = 0.5


class SecondTry:
    """Right at once gives reward 1, right at the second try 0.5. For `reward.function = "environment"`.

    A plain prompt is put again as it was, so that no model meets a character it does not know; a chat gets a message.
    """

    instant = True

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """
        Raises:
            ValueError: the prompt has no answer to compare with.
        """
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.prompt_id} has no answer, and second-try needs one")
        again = "That is wrong. Try again." if prompt.messages else prompt.text
        return _Episode(prompt.answer.strip(), again)


class _Episode:
    def __init__(self, answer: str, again: str) -> None:
        self._answer = answer
        self._again = again
        self._tries = 0

    def step(self, response: str) -> Step:
        self._tries += 1
        right = response.strip() == self._answer
        if self._tries == 1 and not right:
            return Step(done=False, observation=self._again)
        reward = (FIRST_REWARD if self._tries == 1 else SECOND_REWARD) if right else 0.0
        return Step(done=True, reward=reward, metrics={"tries": float(self._tries), "solved": float(right)})
