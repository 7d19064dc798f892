"""What vLLM needs before an engine can be built: a fit machine, the import, the arguments."""

from __future__ import annotations

import gc
import importlib.metadata
import shutil
from typing import Any

import psutil

from actors.engine import EngineSettings
from actors.publication import Checkpoint
from common.errors import ConfigError, ResourceError
from common.weights import ITEM_BYTES

CANARY_PRIORITY = -1  # before everything that waits; all other requests have 0


def check_machine(settings: EngineSettings, checkpoint: Checkpoint) -> None:
    """Refuse early, and in plain words, what vLLM would fail at late.

    Raises:
        ConfigError: the settings contradict each other or the machine.
        ResourceError: too little memory or shared memory.
    """
    if settings.dtype not in ITEM_BYTES:
        raise ConfigError(f"engine dtype {settings.dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    if settings.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("engine.device is 'cuda', but torch sees no GPU; set it to 'cpu'")
    elif settings.transport != "shared_memory":
        raise ConfigError(
            f"weights.transport = {settings.transport!r} needs CUDA, but the engine runs on the CPU; set it to 'auto'"
        )
    weights = checkpoint.size_bytes(settings.dtype)
    if settings.transport == "shared_memory":
        _check_weights_folder(settings.weights_folder, 2 * weights)  # the learner writes one while engines read another
    if settings.device == "cpu":
        needed = weights + (settings.kv_cache_bytes or 0)
        available = psutil.virtual_memory().available
        if available < needed:
            raise ResourceError(
                f"the engine needs {needed / 2**20:.0f} MiB for weights and KV cache, {available / 2**20:.0f} MiB are "
                "free; lower engine.kv_cache_mib or the number of actors"
            )


def _check_weights_folder(folder: str, needed: int) -> None:
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        raise ResourceError(f"weights.folder {folder} cannot be used: {error}") from error
    if size < needed:
        raise ResourceError(
            f"weights.folder {folder} has {size / 2**20:.0f} MiB, two publications of this model need "
            f"{needed / 2**20:.0f} MiB; make it larger (/dev/shm of a container: --shm-size) or set another folder"
        )


def described(error: BaseException) -> str:
    """Kind and words of an error of vLLM's, for our own message."""
    return f"{type(error).__name__}: {error}"


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises when the request is at fault, not the engine."""
    from vllm.exceptions import VLLMClientError

    return ValueError, VLLMClientError


def import_vllm(settings: EngineSettings) -> None:
    """Import vLLM (about 10 s) and register our plugin in this process."""
    gc.disable()  # a quarter of the time of the import would go into collections that find nothing
    try:
        import vllm  # noqa: F401

        from actors import weight_receiver
    finally:
        gc.enable()
    weight_receiver.register()
    plugins = {entry.value for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if settings.kind == "async" and "actors.weight_receiver:register" not in plugins:
        raise ConfigError("vLLM's processes cannot find our plugin: install this package (pip install -e .)")


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs."""
    from vllm.config import WeightTransferConfig

    from actors.weight_receiver import BACKEND

    return {
        "model": settings.model_path,
        "skip_tokenizer_init": True,  # ids in, ids out
        "generation_config": "vllm",  # sampling is what the request says; of the model's own only the EOS ids count
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "block_size": settings.block_size,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": True,
        # A prompt in two pieces ends vLLM on CPUs: for a request with a seed it would have to rewind the generator of
        # random numbers, and "CPU Generator does not use offset". Long prompts come back with every dropped KV.
        "enable_chunked_prefill": settings.device != "cpu",
        "scheduling_policy": "priority",  # puts the canary first after a switch
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        "weight_transfer_config": WeightTransferConfig(
            backend=BACKEND if settings.transport == "shared_memory" else settings.transport
        ),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
