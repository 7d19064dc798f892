"""Plugin of vLLM: weights from a file in shared memory, and the end of engine processes that lost their owner.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins` of this package.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "slipstream_shm"
OWNER_PID = "SLIPSTREAM_ENGINE_OWNER_PID"  # environment variable: the process whose end ends the engine's processes


def register() -> None:
    """Make the backend known and start the watchdog. vLLM calls this several times in one process."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # register_engine raises on the second call
        WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryReceiver)
    parent = multiprocessing.parent_process()
    watched = any(thread.name == BACKEND for thread in threading.enumerate())
    if parent is not None and str(parent.pid) == os.environ.get(OWNER_PID) and not watched:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), name=BACKEND, daemon=True).start()


def _exit_after(sentinel: int) -> None:
    # An engine process whose owner was killed would keep its memory, and its GPU, for ever: it ignores SIGTERM.
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):
    """A publication of the whole model, already validated (`actors.publication`)."""

    path: str
    tensors: list[dict[str, Any]]  # name, shape, dtype, offset: fields of common.weights.TensorSpec


class SharedMemoryReceiver(WeightTransferEngine[SharedMemoryInitInfo, SharedMemoryUpdateInfo]):
    """Loads a publication from the file the learner wrote. One message is one whole update.

    All the work is in `receive_weights`: an exception there reaches the caller and leaves vLLM ready for the next
    update, whereas one from `finish_weight_update` would leave the worker's update open for ever.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Nothing yet: the model must not be touched before the file is open."""

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Load the file at `update_info.path`.

        Raises:
            OSError: the file cannot be opened; the model is untouched.
            Exception: anything later; the model is half loaded and must not serve.
        """
        with open(update_info.path, "rb") as file:
            # A private mapping: torch wants writable memory, and the file must never change.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        weights = [(spec["name"], _tensor(data, spec)) for spec in update_info.tensors]
        load_layerwise(self.model, self.model_config, weights)

    def finish_weight_update(self) -> None:
        """Nothing left to do; see the class."""

    def shutdown(self) -> None:
        """Nothing is held open."""


def load_layerwise(model: Any, model_config: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Load a whole checkpoint into a model that serves, fusing and repacking as at the first load.

    On CPUs each linear weight lives in a packed copy, which only vLLM's layerwise reload renews. A tied output head has
    a packed copy of its own that the reload leaves as it was, with a warning: it is kept out and repacked here.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    tied_head = find_tied_head(model)
    if tied_head is not None:
        parent, attribute, head = tied_head
        weights = [(name, tensor) for name, tensor in weights if not name.endswith(f"{attribute}.weight")]
        delattr(parent, attribute)
    try:
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        if missed := {name for name, _ in model.named_parameters()} - (loaded or set()):
            raise RuntimeError(f"vLLM found nothing in the publication for {', '.join(sorted(missed))}")
        with _without_false_alarms():
            finalize_layerwise_reload(model, model_config)
    finally:
        if tied_head is not None:
            setattr(parent, attribute, head)
    if tied_head is not None:
        head.quant_method.process_weights_after_loading(head)


@contextlib.contextmanager
def _without_false_alarms() -> Iterator[None]:
    """vLLM warns of each layer that only has computed buffers, such as rotary embeddings, that nothing was loaded."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def find_tied_head(model: nn.Module) -> tuple[nn.Module, str, Any] | None:
    """Parent, attribute and module of an output head that shares its parameter with the input embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding)
    ]
    embeddings = {id(module.weight) for _, module in modules if not isinstance(module, ParallelLMHead)}
    for name, module in modules:
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            parent, _, attribute = name.rpartition(".")
            return model.get_submodule(parent), attribute, module
    return None


def _tensor(data: mmap.mmap, spec: dict[str, Any]) -> torch.Tensor:
    shape = tuple(spec["shape"])
    flat = torch.frombuffer(data, dtype=getattr(torch, spec["dtype"]), count=math.prod(shape), offset=spec["offset"])
    return flat.view(shape)
