"""vLLM's plugin by itself. That it loads the right weights is shown through the engine, in test_engine.py."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.engine

NUMBERS = torch.tensor([1.5, -2.0, 3.0, 0.25, 7.0, -8.0])


class Untouchable:
    """A model that must not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"model.{name} was used")


class PartialModel(nn.Module):
    """Says of one of its two parameters that it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


def receiver_of(model: Any) -> Any:
    from actors.weight_receiver import SharedMemoryReceiver

    receiver = object.__new__(SharedMemoryReceiver)  # vLLM's constructor only stores the parts of its configuration
    receiver.model, receiver.model_config = model, None
    return receiver


def test_registering_again_changes_nothing() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from actors.weight_receiver import BACKEND, SharedMemoryReceiver, register

    register()
    register()
    assert WeightTransferEngineFactory._registry[BACKEND]() is SharedMemoryReceiver


def test_watchdog_runs_in_processes_of_an_engine_only() -> None:
    from actors.weight_receiver import BACKEND, register

    register()
    assert BACKEND not in {thread.name for thread in threading.enumerate()}


def test_missing_file_leaves_the_model_alone_and_the_update_can_be_finished(tmp_path: Path) -> None:
    from actors.weight_receiver import SharedMemoryUpdateInfo

    receiver = receiver_of(Untouchable())
    receiver.start_weight_update()
    with pytest.raises(FileNotFoundError):
        receiver.receive_weights(SharedMemoryUpdateInfo(path=str(tmp_path / "missing"), tensors=[]))
    receiver.finish_weight_update()
    receiver.shutdown()


def test_parameter_that_gets_nothing_is_an_error(tmp_path: Path) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from actors.weight_receiver import SharedMemoryUpdateInfo

    file = tmp_path / "w.bin"
    file.write_bytes(NUMBERS[:4].numpy().tobytes())
    tensors = [{"name": "first.weight", "shape": [2, 2], "dtype": "float32", "offset": 0}]
    model = PartialModel()
    record_metadata_for_reloading(model)
    with pytest.raises(RuntimeError, match=r"nothing in the publication for second\.weight"):
        receiver_of(model).receive_weights(SharedMemoryUpdateInfo(path=str(file), tensors=tensors))


def test_tensors_are_read_at_their_place_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    from actors.weight_receiver import _tensor

    half = torch.tensor([0.5, -1.0], dtype=torch.bfloat16)
    file = tmp_path / "w.bin"
    file.write_bytes(NUMBERS.numpy().tobytes() + half.view(torch.uint8).numpy().tobytes())
    before = file.read_bytes()
    with open(file, "rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    tensor = _tensor(data, {"shape": [2, 2], "dtype": "float32", "offset": 8})
    assert tensor.tolist() == [[3.0, 0.25], [7.0, -8.0]]
    assert torch.equal(_tensor(data, {"shape": (2,), "dtype": "bfloat16", "offset": 24}), half)
    tensor.zero_()
    assert file.read_bytes() == before
