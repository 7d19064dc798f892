"""What an actor asks of its inference engine.

Imports neither torch nor vllm: services pass `engine_environment` on before a process of theirs imports either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from common.transport import Transport
from common.types import FinishReason
from common.weights import WeightManifest


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """All that one engine is built from."""

    model_path: str  # folder with config.json and safetensors; these weights are version 0
    kind: Literal["in_process", "async"]  # stepped by a thread of this process; in processes of its own
    device: Literal["cpu", "cuda"]
    max_model_len: int  # tokens of prompt and generation together
    max_num_seqs: int  # requests decoded at once; further ones queue
    dtype: str = "float32"  # of the computation and of the publications; a key of common.weights.ITEM_BYTES
    kv_cache_bytes: int | None = 128 * 2**20  # None on GPUs: what gpu_memory_utilization leaves
    gpu_memory_utilization: float = 0.85
    block_size: int = 32  # tokens of one KV block; prompts share whole blocks only
    seed: int = 0
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    cpu_threads: int = 1  # more than the idle cores make it many times slower: OpenMP threads spin
    transport: Transport = "shared_memory"
    weights_folder: str = "/dev/shm"  # where publications lie on this node
    canary_atol: float = 1e-4  # largest difference of log-probs, nats


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One sequence to be continued."""

    request_id: str  # for messages only; need not be unique
    prompt_ids: Sequence[int]  # at least 1; with max_new_tokens at most max_model_len
    max_new_tokens: int
    temperature: float  # 0: greedy, for evaluation only
    seed: int  # same seed, same weights, same tokens
    stop_token_ids: tuple[int, ...] = ()  # besides the EOS ids of the model's own generation config


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Sampled tokens, the stop token included."""

    token_ids: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n], nats, of the distribution sampled from (temperature applied)
    weight_versions: NDArray[np.int32]  # [n], version that sampled each token
    finish_reason: FinishReason
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """A confirmed load. Durations in seconds."""

    version: int
    validate_s: float  # the engine generates meanwhile
    stall_s: float  # pause to resume: nothing is generated
    canary_s: float  # resume to confirmation: tokens of this version are withheld
    canary_error: float  # nats


class Engine(Protocol):
    """One inference engine. Its calls belong to the event loop that called `start`."""

    @property
    def weight_version(self) -> int:
        """Newest confirmed version."""
        ...

    async def start(self) -> None:
        """Load the model; its weights are version 0.

        Raises:
            ModelError: the model folder is missing or unusable.
            ResourceError: memory or shared memory does not suffice.
            ConfigError: the settings ask for what this machine does not have.
            EngineDeadError: vLLM did not start.
        """
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Continue one sequence. Cancelling the caller aborts the request.

        A generation with tokens of a version that is not confirmed yet is held back until its canary passes.

        Raises:
            ValueError: the request does not fit the model.
            CanaryError: the generation was under way when a canary failed.
            EngineDeadError: the engine cannot serve any more.
        """
        ...

    async def load_weights(self, manifest: WeightManifest, payload: Mapping[str, Any] | None = None) -> WeightUpdate:
        """Validate, pause, load, label, resume, prove. One at a time; goes on when the caller is cancelled.

        Args:
            payload: update info of vLLM's trainer engine, for the transports "nccl" and "ipc" only; they move the
                bytes themselves, so that `manifest.path`, size and digest are not looked at.

        Raises:
            WeightUpdateError: refused before anything was loaded; the old version goes on serving.
            CanaryError: the loaded weights are not the learner's; the engine is unusable from now on.
            EngineDeadError: the load broke off, or the engine was dead before.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs [n - 1] at temperature 1 of each of the n tokens after the first, under one version."""
        ...

    async def connect_transport(self, init_info: Mapping[str, Any]) -> None:
        """Join the learner's NCCL group, or learn its IPC parameters: vLLM's init info, from its trainer engine.

        Raises:
            ConfigError: the engine's transport is shared memory, which needs no connection.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes; pending calls raise EngineDeadError. May be called twice."""
        ...


def make_engine(settings: EngineSettings) -> Engine:
    """An engine that is yet to be started."""
    from actors.engine_vllm import VllmEngine

    return VllmEngine(settings)


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that must be set before vllm or torch are imported.

    A Ray service passes them through `runtime_env`; `Engine.start` sets those that are missing.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",  # model_path is a folder: asking a hub only waits for a time-out
        "TOKENIZERS_PARALLELISM": "false",
        # On CPUs vLLM warns of much that is as it should be: no tcmalloc, no Triton, no tokenizer.
        "VLLM_LOGGING_LEVEL": "ERROR" if settings.device == "cpu" else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if settings.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(settings.cpu_threads),
            "MKL_NUM_THREADS": str(settings.cpu_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins every engine of a node to core 0
        }
        if settings.enforce_eager:
            # enforce_eager leaves two helpers of the sampler to torch.compile: 8 s at the first request.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    if settings.device == "cpu" or settings.kind == "in_process":
        # With 1, the CPU platform silently moves the worker into one more process.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment
