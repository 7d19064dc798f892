"""Scoring in processes of their own, each call with a time limit that ends the work itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack

from actors.reward_process import LENGTH
from actors.scoring import BUILT_IN
from common.config_load import nearest
from common.errors import ConfigError, ResourceError
from common.types import Prompt

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

    Its calls belong to the event loop that called `start`.

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
        self._processes = [_ScoringProcess(function, import_dir) for _ in range(processes)]
        self._idle: asyncio.Queue[_ScoringProcess] = asyncio.Queue()
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
        """
        results = await asyncio.gather(*(process.start() for process in self._processes), return_exceptions=True)
        for problem in filter(None, results):
            await self.close()
            raise problem
        for process in self._processes:
            self._idle.put_nowait(process)

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
        process = await self._idle.get()
        try:
            await process.ready()
            async with asyncio.timeout(self._time_limit_s):
                reply = await process.ask(request)
        except TimeoutError:
            problem = f"took longer than reward.time_limit_s = {self._time_limit_s:g}"
        except _ProcessEndedError as error:
            problem = str(error)
        else:
            if "error" not in reply:
                return Score(reward=reply["reward"], metrics=reply["metrics"])
            problem = reply["error"]
        finally:
            if process.must_be_replaced:  # by now it is killed, so that nothing of the call goes on
                self.replaced += 1
                process.replace()
            self._idle.put_nowait(process)
        return Score(reward=None, error=f"sample {sample_id}: {self._function}: {problem}")

    async def close(self) -> None:
        """End every process and whatever it has started in its group."""
        await asyncio.gather(*(process.close() for process in self._processes))


class _ProcessEndedError(Exception):
    """The process ended before it answered."""


class _ScoringProcess:
    """One process and its replacements. Its process group is its own and is killed whole."""

    def __init__(self, function: str, import_dir: str) -> None:
        self._function = function
        self._import_dir = import_dir
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._asked = False

    @property
    def pid(self) -> int | None:
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process else None

    @property
    def must_be_replaced(self) -> bool:
        """It was asked and has not answered."""
        return self._asked

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
        self._asked = False

    async def ready(self) -> None:
        """Wait for a replacement under way; replace a process that died between calls."""
        if self._starting is None and self.pid is None:
            self._starting = asyncio.ensure_future(self._end_and_start())
        if self._starting is not None:
            await asyncio.shield(self._starting)  # a caller that is cancelled must not leave half a process
            self._starting = None

    async def ask(self, request: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._asked = True
        with contextlib.suppress(ConnectionError):  # its end shows when it is read from
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            await self._process.stdin.drain()
        reply = await self._read()
        self._asked = False
        return reply

    def replace(self) -> None:
        """Kill it, and have another started in the background."""
        self._kill()
        self._asked = False
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
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            header = await self._process.stdout.readexactly(LENGTH.size)
            data = await self._process.stdout.readexactly(*LENGTH.unpack(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._process.wait()
            raise _ProcessEndedError(f"the scoring process ended with status {status}") from None
        message: dict[str, Any] = msgpack.unpackb(data)
        return message


def _request(prompt: Prompt, response: str) -> bytes:
    """The row is given whole: its other columns, and the prompt under `prompt` unless a column has that name."""
    shown = [dict(message) for message in prompt.messages] if prompt.messages else prompt.text
    row = {"prompt": shown, **prompt.row}
    data: bytes = msgpack.packb({"response": response, "answer": prompt.answer, "row": row})
    return data
