"""vLLM's engine stepped by one thread of this process: a fast start, and the shortest stall at a switch."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.engine import EngineSettings
from actors.engine_setup import CANARY_PRIORITY, described, engine_arguments, import_vllm, refusals
from common.errors import EngineDeadError

# How long a thread that wants the interpreter waits before it asks for it. The engine never rests, and the event loop
# would spend Python's 5 ms anew at each of the many small things that it does for a trajectory.
SWITCH_INTERVAL_S = 0.0005

Command = Callable[[], None]  # run by the engine's thread between two steps; an exception ends the engine


class InProcessDriver:
    """See `actors.engine_vllm.Driver`. All of vLLM, its import included, belongs to the one thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._pending: dict[str, asyncio.Future[Any]] = {}  # by request id; belongs to the loop
        self._request_ids = map(str, itertools.count())
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        await self._ready

    async def generate(self, prompt_ids: list[int], params: Any) -> Any:
        request_id, future = self._expect()
        self._submit(lambda: self._add(request_id, prompt_ids, params))
        return await self._answer(request_id, future)

    async def switch_weights(
        self, update_info: dict[str, Any], version: int, canary_ids: list[int], canary_params: Any
    ) -> tuple[float, Awaitable[Any]]:
        canary_id, canary = self._expect()
        switched: asyncio.Future[float] = self._loop.create_future()

        def switch() -> None:
            stall_s = self._switch(update_info, version)
            self._add(canary_id, canary_ids, canary_params, CANARY_PRIORITY)
            self._post(_resolve, switched, stall_s)

        self._submit(switch)
        return await self._while_alive(switched), self._answer(canary_id, canary)

    async def call_workers(self, method: str, **kwargs: Any) -> None:
        future: asyncio.Future[None] = self._loop.create_future()

        def call() -> None:
            try:
                self._llm.collective_rpc(method, kwargs=kwargs)
            except Exception as error:
                self._post(_reject, future, error)
            else:
                self._post(_resolve, future, None)

        self._submit(call)
        await self._while_alive(future)

    async def close(self) -> None:
        if self._thread.is_alive():
            self._submit(self._stop)
            await asyncio.to_thread(self._thread.join)

    # In the loop.

    def _expect(self) -> tuple[str, asyncio.Future[Any]]:
        if self._ended.done():
            raise self._death()
        request_id = next(self._request_ids)
        self._pending[request_id] = self._loop.create_future()
        return request_id, self._pending[request_id]

    async def _answer(self, request_id: str, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except asyncio.CancelledError:
            self._submit(lambda: self._llm.abort_request([request_id]))
            raise
        finally:
            del self._pending[request_id]

    def _submit(self, command: Command) -> None:
        # A command given after the thread has ended is never run; `_ended` tells whoever waits for it.
        self._commands.put(command)

    async def _while_alive(self, future: asyncio.Future[Any]) -> Any:
        await asyncio.wait((future, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return future.result()
        raise self._death()

    def _death(self) -> EngineDeadError:
        return EngineDeadError(
            f"vLLM's engine died: {described(self._error)}" if self._error else "vLLM's engine was stopped"
        )

    def _finish(self, outputs: list[Any]) -> None:
        for output in outputs:
            if (future := self._pending.get(output.request_id)) is not None:
                _resolve(future, output)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        if not self._ready.done():
            self._ready.set_exception(error or self._death())
        for future in self._pending.values():
            _reject(future, self._death())
        _resolve(self._ended, None)

    # In the engine's thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._build()
            self._post(_resolve, self._ready, None)
            self._serve()
        except BaseException as caught:
            error = caught
        finally:
            self._post(self._end, error)
            self._tear_down()

    def _build(self) -> None:
        import_vllm(self._settings)
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        self._set_num_threads = torch.set_num_threads  # vLLM replaces it by a function that does nothing
        if self._settings.device == "cpu":
            torch.set_num_threads(self._settings.cpu_threads)
        arguments = engine_arguments(self._settings)
        # Steps that overlap would put tokens of the old weights under the new label.
        config = EngineArgs(**arguments, async_scheduling=False).create_engine_config()
        self._llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        self._llm.set_weight_version("0")
        gc.freeze()

    def _serve(self) -> None:
        while not self._stopping:
            if not self._llm.has_unfinished_requests():
                self._commands.get()()  # sleeps until there is something to do
            while not self._commands.empty():
                self._commands.get()()
            if self._llm.has_unfinished_requests() and not self._stopping:
                outputs = [output for output in self._llm.step() if output.finished]
                if outputs:
                    self._post(self._finish, outputs)

    def _add(self, request_id: str, prompt_ids: list[int], params: Any, priority: int = 0) -> None:
        from vllm.inputs.engine import tokens_input

        try:
            self._llm.add_request(request_id, tokens_input(prompt_ids), params, priority=priority)
        except refusals() as error:
            self._post(self._refuse, request_id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        if (future := self._pending.get(request_id)) is not None:
            _reject(future, error)

    def _switch(self, update_info: dict[str, Any], version: int) -> float:
        started = time.perf_counter()
        # Between two steps nothing runs: this is the pause. Requests go back to the queue, their KV is dropped.
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})
        self._llm.collective_rpc("finish_weight_update")
        self._llm.set_weight_version(str(version))
        return time.perf_counter() - started

    def _stop(self) -> None:
        self._stopping = True

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits for anything
            self._stopping = True

    def _tear_down(self) -> None:
        import torch

        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            llm.engine_core.shutdown()
            llm.renderer.shutdown()
        if "_set_num_threads" in self.__dict__:
            torch.set_num_threads = self._set_num_threads


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():  # its task may have been cancelled
        future.set_result(result)


def _reject(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # counts as retrieved: whoever waited may have left
