"""Whether groups still teach something."""

from __future__ import annotations

from common.errors import RunFailedError
from deploy.run_dir import Record


class SignalWatch:
    """Counts batches in a row in whose groups all rewards are equal.

    Args:
        limit: such batches in a row that end the run; 0: never.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._ever = False  # a group's rewards differed

    def see(self, update: Record) -> str:
        """Take note of an update record; why the run should end, or empty.

        Raises:
            RunFailedError: the limit is reached, and no group has ever taught anything.
        """
        groups = update.get("batch/groups", 0)
        if not groups:  # a recipe that needs none
            return ""
        if update["batch/uninformative_groups"] < groups:
            self._in_a_row, self._ever = 0, True
            return ""
        self._in_a_row += 1
        if not self._limit or self._in_a_row < self._limit:
            return ""
        reward = f"the last mean reward was {update['batch/reward_mean']:.3g}"
        if not self._ever:
            raise RunFailedError(
                f"in {self._in_a_row} batches no group had rewards that differ, and nothing can be learned ({reward}): "
                "look at `slipstream rollouts`, the reward function and the prompts "
                "(groups.max_uninformative_batches is the limit)"
            )
        return f"nothing left to learn: all rewards were equal in the groups of {self._in_a_row} batches ({reward})"
