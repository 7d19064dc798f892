"""vLLM's asynchronous engine in processes of its own: the usual way on GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import time
from collections.abc import Awaitable, Iterator
from typing import Any

from actors.engine import EngineSettings
from actors.engine_setup import CANARY_PRIORITY, described, engine_arguments, import_vllm, refusals
from common.errors import EngineDeadError


class AsyncDriver:
    """See `actors.engine_vllm.Driver`."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._request_ids = map(str, itertools.count())
        self._llm: Any = None

    async def start(self) -> None:
        await asyncio.to_thread(self._build)
        await self._llm.update_weight_version("0")

    async def generate(self, prompt_ids: list[int], params: Any) -> Any:
        from vllm.inputs.engine import tokens_input

        final = None
        with _vllm_errors():
            async for output in self._llm.generate(tokens_input(prompt_ids), params, next(self._request_ids)):
                final = output
        return final

    async def switch_weights(
        self, update_info: dict[str, Any], version: int, canary_ids: list[int], canary_params: Any
    ) -> tuple[float, Awaitable[Any]]:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.inputs.engine import tokens_input

        llm = self._llm
        started = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))
        await llm.finish_weight_update(weight_version=str(version))
        # Queued while paused, so that nothing can be scheduled before it.
        canary = await llm.add_request(
            next(self._request_ids), tokens_input(canary_ids), canary_params, priority=CANARY_PRIORITY
        )
        await llm.resume_generation()
        return time.perf_counter() - started, self._answer(canary)

    async def _answer(self, collector: Any) -> Any:
        with _vllm_errors():
            return await collector.get()

    async def call_workers(self, method: str, **kwargs: Any) -> None:
        await self._llm.collective_rpc(method, kwargs=kwargs)

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.output_handler.cancel()  # it would report the end of its engine as an error
            await asyncio.to_thread(self._llm.shutdown)
            self._llm = None
            gc.collect()  # breaks its cycles now: at the interpreter's exit its destructor fails

    def _build(self) -> None:
        import_vllm(self._settings)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from actors.weight_receiver import OWNER_PID

        os.environ[OWNER_PID] = str(os.getpid())
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self._settings)))


@contextlib.contextmanager
def _vllm_errors() -> Iterator[None]:
    try:
        yield
    except refusals():
        raise
    except Exception as error:
        raise EngineDeadError(f"vLLM's engine died: {described(error.__cause__ or error)}") from error
