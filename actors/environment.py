"""What the model talks to: a factory of episodes, several turns from the start, and calls to it with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from common.config import EnvironmentConfig
from common.config_load import nearest
from common.errors import ConfigError, EngineDeadError
from common.imports import load_object
from common.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """Answer of an environment to one turn of the model."""

    done: bool
    observation: str | tuple[Mapping[str, str], ...] = ""  # what the model reads next: a text, or chat messages
    reward: float = 0.0  # for this turn; part of the trajectory's reward
    metrics: Mapping[str, float] = field(default_factory=dict)


class Episode(Protocol):
    """One conversation. Its calls come one after the other, from changing threads."""

    def step(self, response: str) -> Step:
        """Called after every turn of the model, one that was cut off at the length limit too."""
        ...


class Environment(Protocol):
    """Stateless; made once for an actor.

    One with an attribute `instant = True` is called straight from the event loop: for code of ours that computes next
    to nothing and cannot hang.
    """

    def start(self, prompt: Prompt, seed: int) -> Episode:
        """A new episode that begins with `prompt`."""
        ...


class StepTimeoutError(Exception):
    """A call into an environment took longer than its limit."""


class StuckEnvironmentError(EngineDeadError):
    """Too many calls into the environment never came back. Only the end of the process ends their threads."""


def make_environment(config: EnvironmentConfig, import_dir: str = "") -> Environment:
    """The environment that the config names.

    Raises:
        ConfigError: the name is unknown, cannot be imported, or does not fit `environment.max_turns`.
    """
    from actors.environments import ENVIRONMENTS

    if ":" in config.name:
        made = load_object(config.name, import_dir, setting="environment.name")()
        if not callable(getattr(made, "start", None)):
            raise ConfigError(f"environment.name = {config.name!r}: its instances have no method start(prompt, seed)")
        return made  # type: ignore[no-any-return]
    if config.name not in ENVIRONMENTS:
        hint = nearest(config.name, list(ENVIRONMENTS)) or ": choose " + ", ".join(ENVIRONMENTS) + ", or MODULE:CLASS"
        raise ConfigError(f"environment.name = {config.name!r} is unknown{hint}")
    if config.name == "second-try" and config.max_turns < 2:
        raise ConfigError(f"environment.max_turns = {config.max_turns} leaves no second try: set it to 2")
    return ENVIRONMENTS[config.name]()


class Caller(Protocol):
    """How an environment is called."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function(*arguments)` returns or raises."""
        ...


def make_caller(environment: Environment, limit_s: float) -> Caller:
    return DirectCaller() if getattr(environment, "instant", False) else EnvironmentCaller(limit_s)


class DirectCaller:
    """Calls at once, in the event loop. Handing a call to a thread costs more than such a call itself."""

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


class EnvironmentCaller:
    """Runs code of an environment in threads of its own, each call with a time limit.

    Threads are used again: while an engine keeps the interpreter busy, starting one takes many times as long as a short
    call. A thread cannot be killed: one that hangs is left behind, and too many of them are an error, so that the actor
    is replaced instead of drowning in them.

    Args:
        limit_s: of one call.
        max_stuck: threads that may be left behind.
    """

    def __init__(self, limit_s: float, max_stuck: int = 16) -> None:
        self._limit_s = limit_s
        self._max_stuck = max_stuck
        self._idle: list[_CallThread] = []
        self._stuck: list[_CallThread] = []

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function(*arguments)` returns or raises.

        Raises:
            StepTimeoutError: it took longer than the limit.
            StuckEnvironmentError: more than `max_stuck` earlier calls are still running.
        """
        self._idle += [thread for thread in self._stuck if not thread.busy]
        self._stuck = [thread for thread in self._stuck if thread.busy]
        if len(self._stuck) > self._max_stuck:
            raise StuckEnvironmentError(
                f"{len(self._stuck)} calls into the environment are still running after "
                f"environment.step_time_limit_s = {self._limit_s:g}: raise the limit, or mend the environment"
            )
        thread = self._idle.pop() if self._idle else _CallThread()
        answer = thread.begin(function, *arguments)
        try:
            await asyncio.wait({answer}, timeout=self._limit_s)
        finally:  # also when the caller is cancelled
            (self._idle if answer.done() else self._stuck).append(thread)
            answer.cancel()  # no effect on one that is done
        if answer.cancelled():
            raise StepTimeoutError(f"the environment took longer than {self._limit_s:g} s")
        return answer.result()


class _CallThread:
    """A thread for one call after the other. It ends with the process."""

    def __init__(self) -> None:
        self.busy = False
        """A call is running."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    def begin(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Start a call; the future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if answer.done():  # too late, or given up
                return
            if error is None:
                answer.set_result(result)  # type: ignore[arg-type]
            else:
                answer.set_exception(error)

        def work() -> None:
            result: T | None = None
            error: Exception | None = None
            try:
                result = function(*arguments)
            except StopIteration as stop:  # cannot be put into a future
                error = RuntimeError(f"StopIteration: {stop}")
            except BaseException as raised:  # an exit() in a thread must not end quietly
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
            self.busy = False  # before the loop hears of it and gives the next call
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        self.busy = True
        self._calls.put(work)
        return answer

    def _run(self) -> None:
        while True:
            self._calls.get()()
