"""vLLM as an `Engine`: versions, the canary, and what is withheld until it passes. The driver under it runs vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.engine import EngineSettings, Generation, GenerationRequest, WeightUpdate, engine_environment
from actors.engine_setup import check_machine, described, refusals
from actors.publication import check_contents, checked_file, read_checkpoint
from common.errors import (
    CanaryError,
    ConfigError,
    EngineDeadError,
    ModelError,
    SlipstreamError,
    WeightUpdateError,
)
from common.types import FinishReason
from common.weights import WeightManifest

T = TypeVar("T")

CANARY_TIME_LIMIT_S = 300.0


class Driver(Protocol):
    """One vLLM engine, in this process or in its own. Raises EngineDeadError once vLLM has died."""

    async def start(self) -> None:
        """Load the model and label it version 0."""
        ...

    async def generate(self, prompt_ids: list[int], params: Any) -> Any:
        """vLLM's final RequestOutput. `params` are SamplingParams; cancelling aborts the request."""
        ...

    async def switch_weights(
        self, update_info: dict[str, Any], version: int, canary_ids: list[int], canary_params: Any
    ) -> tuple[float, Awaitable[Any]]:
        """Pause with requests kept and KV dropped, load, label, resume; the canary is scheduled before all else.

        Returns seconds in which nothing was generated, and the canary's RequestOutput to be awaited. After an exception
        the engine serves nothing any more.
        """
        ...

    async def call_workers(self, method: str, **kwargs: Any) -> None:
        """Call a method of vLLM's workers."""
        ...

    async def close(self) -> None:
        """End vLLM."""
        ...


@dataclass(slots=True)
class _Unconfirmed:
    version: int
    confirmed: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """See `actors.engine.Engine`.

    Invariant: a token of version v leaves `generate` only after v reproduced the learner's canary.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._driver = _make_driver(settings)
        self._weight_version = 0
        self._unconfirmed: _Unconfirmed | None = None
        self._update_lock = asyncio.Lock()
        self._updates: set[asyncio.Task[WeightUpdate]] = set()  # keeps updates of cancelled callers alive
        self._failure: SlipstreamError | None = None
        self._dead = asyncio.Event()  # set together with the failure

    @property
    def weight_version(self) -> int:
        return self._weight_version

    async def start(self) -> None:
        settings = self._settings
        self._checkpoint = read_checkpoint(settings.model_path)
        check_machine(settings, self._checkpoint)
        for name, value in engine_environment(settings).items():
            os.environ.setdefault(name, value)  # what the user has set stays
        try:
            await self._driver.start()
        except SlipstreamError:
            raise
        except ValueError as error:  # vLLM's word for a model or a setting that it cannot use
            raise ModelError(f"vLLM cannot use the model at {settings.model_path}: {error}") from error
        except Exception as error:
            raise EngineDeadError(
                f"vLLM did not start with the model at {settings.model_path}: {described(error)}"
            ) from error

    async def generate(self, request: GenerationRequest) -> Generation:
        self._require_usable()
        prompt_ids = self._check_request(request)
        try:
            output = await self._unless_dead(self._driver.generate(prompt_ids, sampling_params(request)))
        except refusals() as error:
            raise ValueError(f"request {request.request_id}: {error}") from error
        try:
            generation = _to_generation(request.request_id, output)
        except EngineDeadError as error:
            self._die(error)
            raise
        update = self._unconfirmed
        if update is not None and (generation.weight_versions == update.version).any():
            await self._unless_dead(update.confirmed.wait())
        return generation

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        async with self._update_lock:  # one version from the first token to the last
            self._require_usable()
            if not 2 <= len(token_ids) < self._settings.max_model_len:
                raise ValueError(f"{len(token_ids)} tokens to score: needs 2 to {self._settings.max_model_len - 1}")
            ids = self._check_tokens("score", token_ids)
            return _prompt_logprobs(await self._unless_dead(self._driver.generate(ids, _scoring_params())))

    async def load_weights(self, manifest: WeightManifest, payload: Mapping[str, Any] | None = None) -> WeightUpdate:
        self._require_usable()
        # A load that is broken off half way would leave an engine that cannot serve.
        task = asyncio.ensure_future(self._load_weights(manifest, payload))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        return await asyncio.shield(task)

    async def connect_transport(self, init_info: Mapping[str, Any]) -> None:
        self._require_usable()
        if self._settings.transport == "shared_memory":
            raise ConfigError("the engine's transport is 'shared_memory', which needs no connection")
        async with self._update_lock:
            await self._unless_dead(self._driver.call_workers("init_weight_transfer_engine", init_info=dict(init_info)))

    async def close(self) -> None:
        self._die(EngineDeadError("the engine was closed"))
        await self._driver.close()

    async def _load_weights(self, manifest: WeightManifest, payload: Mapping[str, Any] | None) -> WeightUpdate:
        async with self._update_lock:
            self._require_usable()
            started = time.perf_counter()
            with contextlib.ExitStack() as opened:  # the checked file stays open until it is loaded
                update_info = await self._validate(manifest, payload, opened)
                validated = time.perf_counter()
                # Before the switch: no generation may slip through between the first new token and the canary.
                self._unconfirmed = update = _Unconfirmed(manifest.version)
                stall_s, canary_s, canary_error = await self._switch(manifest, update_info)
            self._weight_version = manifest.version
            self._unconfirmed = None
            update.confirmed.set()
            return WeightUpdate(
                version=manifest.version,
                validate_s=validated - started,
                stall_s=stall_s,
                canary_s=canary_s,
                canary_error=canary_error,
            )

    async def _validate(
        self, manifest: WeightManifest, payload: Mapping[str, Any] | None, opened: contextlib.ExitStack
    ) -> dict[str, Any]:
        """Check all that can be checked; vLLM's update info."""
        if manifest.version < self._weight_version:
            raise WeightUpdateError(f"version {manifest.version} is older than the engine's {self._weight_version}")
        check_contents(manifest, self._checkpoint, self._settings.dtype, self._settings.max_model_len)
        if self._settings.transport != "shared_memory":
            if payload is None:
                raise WeightUpdateError(f"version {manifest.version}: {self._settings.transport} needs a payload")
            return dict(payload)
        path = await asyncio.to_thread(opened.enter_context, checked_file(manifest, self._checkpoint))
        return {"path": path, "tensors": [asdict(spec) for spec in manifest.tensors]}

    async def _switch(self, manifest: WeightManifest, update_info: dict[str, Any]) -> tuple[float, float, float]:
        """Load and prove; stall and canary in seconds, canary error in nats. Any failure is the engine's end."""
        canary_ids = list(manifest.canary.token_ids)
        try:
            stall_s, canary = await self._unless_dead(
                self._driver.switch_weights(update_info, manifest.version, canary_ids, _scoring_params())
            )
            resumed = time.perf_counter()
            canary_error = await self._prove(manifest, canary)
        except SlipstreamError:
            raise
        except Exception as error:
            self._fail(EngineDeadError(f"version {manifest.version}: loading broke off: {described(error)}"))
        return stall_s, time.perf_counter() - resumed, canary_error

    async def _prove(self, manifest: WeightManifest, canary_output: Awaitable[Any]) -> float:
        """Largest difference between the engine's and the learner's log-probs of the canary, within the tolerance."""
        version, expected = manifest.version, manifest.canary.logprobs
        try:
            output = await asyncio.wait_for(self._unless_dead(canary_output), CANARY_TIME_LIMIT_S)
        except TimeoutError:
            self._fail(CanaryError(f"version {version}: no answer to the canary in {CANARY_TIME_LIMIT_S:.0f} s"))
        if (served := output.outputs[0].weight_versions[0].version) != str(version):
            self._fail(CanaryError(f"version {version}: the canary was served by version {served}"))
        logprobs = _prompt_logprobs(output)
        differences = np.abs(logprobs - np.asarray(expected, np.float32))
        worst = int(np.argmax(differences))  # the first NaN, if there is one
        error = float(differences[worst])
        if not error <= self._settings.canary_atol:
            self._fail(
                CanaryError(
                    f"version {version}: log-prob of canary token {worst + 1} is {logprobs[worst]:.6g}, the learner's "
                    f"{expected[worst]:.6g}; allowed difference {self._settings.canary_atol:g}. The engine does not "
                    "hold the learner's weights and must be replaced"
                )
            )
        return error

    async def _unless_dead(self, work: Awaitable[T]) -> T:
        """Result of `work`; raises the engine's failure as soon as there is one, and then gives `work` up."""
        task = asyncio.ensure_future(work)
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait((task, dead), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._raise_failure()
            try:
                return task.result()
            except EngineDeadError as error:
                self._fail(error)
        finally:
            task.cancel()
            dead.cancel()

    def _die(self, failure: SlipstreamError) -> None:
        if self._failure is None:
            self._failure = failure
            self._dead.set()

    def _fail(self, failure: SlipstreamError) -> NoReturn:
        self._die(failure)
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        assert self._failure is not None
        raise type(self._failure)(str(self._failure)) from self._failure

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(f"the engine refuses work: {self._failure}") from self._failure

    def _check_request(self, request: GenerationRequest) -> list[int]:
        n, limit = len(request.prompt_ids), self._settings.max_model_len
        if n < 1 or request.max_new_tokens < 1 or n + request.max_new_tokens > limit:
            raise ValueError(
                f"request {request.request_id}: {n} prompt tokens and {request.max_new_tokens} new ones; needs one of "
                f"each at least, together at most {limit}"
            )
        return self._check_tokens(f"request {request.request_id}", request.prompt_ids)

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> list[int]:
        # vLLM would look the token up beyond the embedding, which ends the engine.
        ids = [int(token) for token in token_ids]
        if min(ids) < 0 or max(ids) >= self._checkpoint.vocab_size:
            raise ValueError(f"{what}: a token is outside the vocabulary of {self._checkpoint.vocab_size}")
        return ids


def _make_driver(settings: EngineSettings) -> Driver:
    if settings.kind == "async":
        from actors.engine_async import AsyncDriver

        return AsyncDriver(settings)
    from actors.engine_inprocess import InProcessDriver

    return InProcessDriver(settings)


def sampling_params(request: GenerationRequest) -> Any:
    """vLLM's SamplingParams."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=1.0,
        top_k=0,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _scoring_params() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _prompt_logprobs(output: Any) -> NDArray[np.float32]:
    """[n - 1]: the first of the n prompt tokens has none."""
    return np.asarray(output.prompt_logprobs.logprobs, np.float32)


def _to_generation(request_id: str, output: Any) -> Generation:
    """Raises EngineDeadError when the engine gave the request up or computed what is not a probability."""
    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise EngineDeadError(f"request {request_id}: the engine ended it with {completion.finish_reason!r}")
    token_ids = np.asarray(completion.token_ids, np.int32)
    logprobs = np.asarray(completion.logprobs.logprobs, np.float32)
    if not np.isfinite(logprobs).all():
        raise EngineDeadError(f"request {request_id}: the engine's log-probs are not finite")
    weight_versions = np.full(len(token_ids), -1, np.int32)
    for span in completion.weight_versions:
        weight_versions[span.start : span.end] = int(span.version)
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=weight_versions,
        finish_reason=FinishReason(completion.finish_reason),
        num_cached_tokens=output.num_cached_tokens or 0,
    )
