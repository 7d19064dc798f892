"""Scoring in processes of their own, each call with a time limit that ends the work itself."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from actors.reward_process import LENGTH
from actors.scoring import BUILT_IN
from common.config_load import nearest
from common.errors import ConfigError, ResourceError
from common.types import Prompt

AT_ONCE_S = 0.02  # what calls that a process is handed together may take
MAX_AT_ONCE = 64
START_LIMIT_S = 120.0  # for the imports of a user's scoring function
ENVIRONMENT_REWARD = "environment"  # the sum of the environment's rewards: nothing is called


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Outcome of one call."""

    reward: float | None  # None: unscorable
    error: str = ""  # why, naming the sample
    metrics: Mapping[str, float] = field(default_factory=dict)


class RewardPool:
    """A fixed number of scoring processes; a call that hangs is killed with its process, which is replaced at once.

    Calls that wait are handed to a process several at a time if they are short: beside an engine that keeps the
    interpreter busy, a message costs far more time than a short call. Its calls belong to the event loop that called
    `start`.

    Args:
        function: what `reward.function` holds, other than `environment`.
        import_dir: folder that a user's function is imported from.
        processes: calls at the same time.
        time_limit_s: of one call, from its start to its result; waiting for a free process is not counted.

    Raises:
        ConfigError: the name of the function is unknown.
    """

    def __init__(self, function: str, import_dir: str, *, processes: int, time_limit_s: float) -> None:
        if ":" not in function and function not in BUILT_IN:
            names = [*BUILT_IN, ENVIRONMENT_REWARD]
            hint = nearest(function, names) or ": choose " + ", ".join(names) + ", or MODULE:FUNCTION"
            raise ConfigError(f"reward.function = {function!r} is unknown{hint}")
        self._function = function
        self._time_limit_s = time_limit_s
        self._processes = [_ScoringProcess(function, import_dir, time_limit_s) for _ in range(processes)]
        self._waiting: deque[_Call] = deque()
        self._arrival = asyncio.Event()
        self._work: list[asyncio.Task[None]] = []
        self._closed = False
        self.replaced = 0
        """Processes that were killed, or died, in the middle of a call."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the pool."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start every process.

        Raises:
            ConfigError: the scoring function cannot be imported.
            ResourceError: a process does not start.
            CancelledError: the pool was closed meanwhile.
        """
        results = await asyncio.gather(*(process.start() for process in self._processes), return_exceptions=True)
        if self._closed:
            await asyncio.gather(*(process.close() for process in self._processes))  # one may have come up since
            raise asyncio.CancelledError
        for problem in filter(None, results):
            await self.close()
            raise problem
        self._work = [asyncio.ensure_future(self._feed(process)) for process in self._processes]

    async def score(self, prompt: Prompt, response: str, sample_id: int | str) -> Score:
        """Score one response. Whatever the scoring function does makes this sample unscorable at worst.

        Raises:
            ConfigError, ResourceError: a process could not be replaced.
        """
        try:
            request = _request(prompt, response)
        except (TypeError, ValueError, OverflowError) as error:
            return Score(
                reward=None, error=f"sample {sample_id}: its row cannot be sent to the scoring process: {error}"
            )
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrival.set()
        reply = await call.answer
        if "error" in reply:
            return Score(reward=None, error=f"sample {sample_id}: {self._function}: {reply['error']}")
        return Score(reward=reply["reward"], metrics=reply["metrics"])

    async def _feed(self, process: _ScoringProcess) -> None:
        """Hand one process its share of the waiting calls, again and again."""
        while True:
            while not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            share = -(-len(self._waiting) // len(self._processes))
            calls = [self._waiting.popleft() for _ in range(min(share, process.num_at_once))]
            try:
                unharmed = await process.run([call for call in calls if not call.answer.done()])
            except asyncio.CancelledError:  # the pool is being closed
                for call in calls:
                    call.answer.cancel()
                raise
            except Exception as error:  # there is no process any more; the waiting must not wait for ever
                for call in calls:
                    call.end(error)
                continue
            if process.must_be_replaced:
                self.replaced += 1
                process.replace()
            self._waiting.extendleft(reversed(unharmed))

    async def close(self) -> None:
        """End every process and whatever it has started in its group."""
        self._closed = True
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for call in self._waiting:
            call.answer.cancel()
        await asyncio.gather(*(process.close() for process in self._processes))


class _ProcessEndedError(Exception):
    """The process ended before it answered."""


@dataclass(slots=True, eq=False)
class _Call:
    request: bytes
    answer: asyncio.Future[dict[str, Any]]  # as `actors.reward_process.answer` gives it; cancelled: nobody wants it

    def end(self, result: dict[str, Any] | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class _ScoringProcess:
    """One process and its replacements. Its process group is its own and is killed whole."""

    def __init__(self, function: str, import_dir: str, time_limit_s: float) -> None:
        self._function = function
        self._import_dir = import_dir
        self._time_limit_s = time_limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._current: _Call | None = None  # what it works on; a call that was sent waits in its pipe before that
        self._killed_for: _Call | None = None
        self._long_s = math.inf  # the longest of the latest calls, roughly

    @property
    def pid(self) -> int | None:
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else None

    @property
    def must_be_replaced(self) -> bool:
        """It has not answered."""
        return self._current is not None

    @property
    def num_at_once(self) -> int:
        """Calls that it may be handed together."""
        return max(1, min(MAX_AT_ONCE, int(AT_ONCE_S / max(self._long_s, 1e-6))))

    async def start(self) -> None:
        # The child searches modules where this process does, whatever its current directory holds.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from actors.reward_process import main; "
            f"main({self._function!r}, {self._import_dir!r}, {os.getpid()})"
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            async with asyncio.timeout(START_LIMIT_S):
                reply = await self._read()
        except OSError as error:
            raise ResourceError(f"a scoring process cannot be started: {error}") from error
        except TimeoutError:
            raise ResourceError(
                f"reward.function = {self._function!r} was not imported within {START_LIMIT_S:g} s"
            ) from None
        except _ProcessEndedError as error:
            raise ResourceError(f"reward.function = {self._function!r}: {error} while it was imported") from None
        if "error" in reply:
            raise ConfigError(reply["error"])
        self._current = self._killed_for = None

    async def ready(self) -> None:
        """Wait for a replacement under way; replace a process that died between calls."""
        if self._starting is None and (self.pid is None or self._killed_for):
            self._starting = asyncio.ensure_future(self._end_and_start())
        if self._starting is not None:
            await asyncio.shield(self._starting)  # a caller that is cancelled must not leave half a process
            self._starting = None

    async def run(self, calls: Sequence[_Call]) -> Sequence[_Call]:
        """Make calls one after the other; each has the time limit for itself, and ends as soon as it is answered.

        Returns:
            Calls that were not begun, because one before them took the process with it; then `must_be_replaced`.

        Raises:
            ConfigError, ResourceError: see `start`.
        """
        await self.ready()
        assert self._process is not None
        assert self._process.stdin is not None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # its end shows when it is read from
            self._process.stdin.write(b"".join(LENGTH.pack(len(call.request)) + call.request for call in calls))
        for index, call in enumerate(calls):
            self._current = call
            call.answer.add_done_callback(functools.partial(self._on_done, call))
            timer = loop.call_later(self._time_limit_s, self._on_overdue, call)
            try:
                reply = await self._read()
            except _ProcessEndedError as error:
                if self._killed_for not in (None, call):  # one that was answered at the last moment
                    return calls[index:]
                limit = f"took longer than reward.time_limit_s = {self._time_limit_s:g}"
                call.end({"error": limit if self._killed_for else str(error)})
                return calls[index + 1 :]
            finally:
                timer.cancel()
            self._current = None
            self._long_s = max(reply["seconds"], 0.9 * self._long_s) if self._long_s < math.inf else reply["seconds"]
            call.end(reply)
        return ()

    def _on_overdue(self, call: _Call) -> None:
        if self._current is call:
            self._killed_for = call
            self._kill()

    def _on_done(self, call: _Call, answer: asyncio.Future[dict[str, Any]]) -> None:
        if answer.cancelled() and self._current is call:  # nothing of it shall go on
            self._killed_for = call
            self._kill()

    def replace(self) -> None:
        """Kill it, and have another started in the background."""
        self._kill()
        self._current = None
        self._starting = asyncio.ensure_future(self._end_and_start())

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._end()

    async def _end_and_start(self) -> None:
        await self._end()
        await self.start()

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:  # else its number may by now be another's
            self._kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
        self._process = None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> dict[str, Any]:
        process = self._process  # kept here: `close` may end it, and forget it, while this waits
        assert process is not None
        assert process.stdout is not None
        try:
            header = await process.stdout.readexactly(LENGTH.size)
            data = await process.stdout.readexactly(*LENGTH.unpack(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            raise _ProcessEndedError(f"the scoring process ended with status {status}") from None
        message: dict[str, Any] = msgpack.unpackb(data)
        return message


def _request(prompt: Prompt, response: str) -> bytes:
    """The row is given whole: its other columns, and the prompt under `prompt` unless a column has that name."""
    shown = [dict(message) for message in prompt.messages] if prompt.messages else prompt.text
    row = {"prompt": shown, **prompt.row}
    data: bytes = msgpack.packb({"response": response, "answer": prompt.answer, "row": row})
    return data
