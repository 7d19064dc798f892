"""What of a learner goes into a checkpoint folder, and back: safetensors and JSON, nothing that can run code.

    policy/                 weights in float32 as a transformers folder, with the tokenizer's files: usable as a model
    value.safetensors       value function, for recipes that have one
    optimizer.safetensors   moments and step counts, `policy/...` and `value/...`
    prompts.json            what is remembered of each prompt, for recipes that do
    state.json              counters

A step draws no random numbers, so that there is no generator to save.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config import RunConfig
from common.errors import ConfigError
from common.types import BatchId
from learner.quiet import no_progress_bars
from learner.trunk import Compute, load_model

if TYPE_CHECKING:
    from learner.update import Learner

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MEMORY_FILE = "prompts.json"
VALUE_FILE = "value.safetensors"
POLICY_FOLDER = "policy"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """`state.json`."""

    completed_updates: int
    weight_version: int
    value_batches: int
    last_finished_batch: int | None  # samples of later batches are not in these weights
    recipe: str
    value: str  # algorithm.value
    config_digest: str  # of the whole configuration
    buffer_state: Mapping[str, Any]  # as `LearnerLink.state` gave it


def config_digest(config: RunConfig) -> str:
    """blake3 of the configuration, hexadecimal."""
    return blake3(config.model_dump_json().encode()).hexdigest()


def state_size_bytes(learner: Learner) -> int:
    """About what `write_state` will write."""
    tensors = [
        *learner.policy.model.parameters(),
        *_optimizer_tensors(learner).values(),
        *_value_tensors(learner).values(),
    ]
    return sum(tensor.nbytes for tensor in tensors)


def write_state(
    learner: Learner, folder: Path, *, last_finished_batch: BatchId | None, buffer_state: Mapping[str, Any]
) -> None:
    """Write everything into the existing, empty `folder`."""
    policy = folder / POLICY_FOLDER
    with no_progress_bars():
        learner.policy.model.save_pretrained(policy)
    for file in learner.policy.folder.iterdir():  # tokenizer, chat template, licence
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and not (policy / file.name).exists():
            shutil.copyfile(file, policy / file.name)
    save_file(_contiguous(_optimizer_tensors(learner)), folder / OPTIMIZER_FILE)
    if learner.value:
        save_file(_contiguous(_value_tensors(learner)), folder / VALUE_FILE)
    if learner.memory:
        (folder / MEMORY_FILE).write_text(json.dumps(learner.memory.state()), encoding="utf-8")
    counters = Counters(
        completed_updates=learner.completed_updates,
        weight_version=learner.weight_version,
        value_batches=learner.value_batches,
        last_finished_batch=last_finished_batch,
        recipe=learner.config.recipe,
        value=learner.config.algorithm.value,
        config_digest=config_digest(learner.config),
        buffer_state=buffer_state,
    )
    (folder / STATE_FILE).write_text(json.dumps(asdict(counters), indent=1), encoding="utf-8")


def read_counters(folder: Path) -> Counters:
    """Counters of a checkpoint that has been found complete."""
    return Counters(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))


def read_state(learner: Learner, folder: Path) -> BatchId | None:
    """Put a checkpoint into a learner of the same settings; returns the last batch that is in its weights.

    Raises:
        ConfigError: the checkpoint's model, value function or trained layers are others.
    """
    counters = read_counters(folder)
    wanted = learner.config.algorithm.value
    if counters.value != wanted:
        raise _other_settings(folder, f"has algorithm.value = {counters.value!r}, and the run {wanted!r}")
    if counters.config_digest != config_digest(learner.config):
        log.warning("settings have changed since checkpoint %s was saved", folder)
    try:
        _load_policy(learner, folder)
        optimizer = load_file(folder / OPTIMIZER_FILE)
        learner.optimizer.load_tensors(_below("policy/", optimizer))
        if learner.value and learner.value_optimizer:
            _copy(load_file(folder / VALUE_FILE), _value_tensors(learner))
            learner.value_optimizer.load_tensors(_below("value/", optimizer))
        if learner.memory:
            learner.memory.load_state(json.loads((folder / MEMORY_FILE).read_text(encoding="utf-8")))
    except (KeyError, RuntimeError, FileNotFoundError) as error:  # RuntimeError: torch says that shapes or names differ
        first_line = (str(error).splitlines() or [repr(error)])[0]
        raise _other_settings(folder, f"does not fit: {first_line}") from error
    learner.completed_updates = counters.completed_updates
    learner.weight_version = counters.weight_version
    learner.value_batches = counters.value_batches
    return None if counters.last_finished_batch is None else BatchId(counters.last_finished_batch)


def _other_settings(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"checkpoint {folder} {what}: go on with the settings it was saved with, or set another run_dir")


def _load_policy(learner: Learner, folder: Path) -> None:
    saved = load_model(folder / POLICY_FOLDER, Compute(torch.device("cpu"), torch.float32))
    learner.policy.model.load_state_dict(saved.state_dict())


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = {f"policy/{name}": tensor for name, tensor in learner.optimizer.tensors().items()}
    if learner.value_optimizer:
        tensors |= {f"value/{name}": tensor for name, tensor in learner.value_optimizer.tensors().items()}
    return tensors


def _value_tensors(learner: Learner) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in learner.value.named_parameters()} if learner.value else {}


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
