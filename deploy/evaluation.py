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

    def due(self, updates: int, *, final: bool) -> int | None:
        """The number of completed updates to be evaluated now; none when nothing is due."""
        if self._every is None or self.running:
            return None
        if final or self._evaluated < 0:
            target = updates
        else:
            target = updates // self._every * self._every if self._every else 0
        return target if target > self._evaluated else None

    def start(self, target: int) -> None:
        self._running = target

    def finished(self) -> None:
        assert self._running is not None
        self._evaluated, self._running = self._running, None

    def lost(self) -> None:
        """It ended without a result and is due again."""
        self._running = None

    def complete(self, updates: int) -> bool:
        """Whether nothing more is to come after the last update."""
        return self._every is None or (not self.running and self._evaluated >= updates)
