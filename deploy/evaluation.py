"""When held-out prompts are evaluated."""

from __future__ import annotations


class EvaluationSchedule:
    """Before the first update, every so many updates, and after the last; one at a time.

    Args:
        every_updates: 0 for only before and after; none for never.
    """

    def __init__(self, every_updates: int | None) -> None:
        self._every = every_updates
        self._running: int | None = None
        self._evaluated = -1  # completed updates of the last finished evaluation

    @property
    def running(self) -> bool:
        return self._running is not None

    def due(self, updates: int, *, final: bool) -> bool:
        """Whether the weights after so many completed updates are to be evaluated now."""
        if self._every is None or self.running:
            return False
        if final or self._evaluated < 0:
            return updates > self._evaluated
        last_due = updates // self._every * self._every if self._every else 0
        return last_due > self._evaluated

    def start(self, updates: int) -> None:
        self._running = updates

    def finished(self) -> None:
        assert self._running is not None
        self._evaluated, self._running = self._running, None

    def lost(self) -> None:
        """It ended without a result and is due again."""
        self._running = None

    def went_back(self, updates: int) -> None:
        """The learner was restored to so many completed updates: later ones will be made, and evaluated, again."""
        self._evaluated = min(self._evaluated, updates)

    def complete(self, updates: int) -> bool:
        """Whether nothing more is to come after the last update."""
        return self._every is None or (not self.running and self._evaluated >= updates)
