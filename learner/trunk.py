"""A causal language model loaded from a local folder, and the parts of it that the learner uses."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from common.errors import ModelError
from common.safetensors_header import shapes_in_header
from learner.batching import MicroBatch

disable_progress_bar()  # log files are not terminals

Attention = Literal["flash_attention_2", "flex_attention"]  # names of transformers


@dataclass(frozen=True, slots=True)
class Compute:
    """Where and how a model computes."""

    device: torch.device
    dtype: torch.dtype  # float32, or what autocast computes in; parameters are float32 either way
    attention: Attention | None = None  # none: torch's, where the model has it


def load_model(folder: Path, compute: Compute) -> Any:
    """The model in `folder`, a transformers `PreTrainedModel` in float32, without dropout.

    Raises:
        ModelError: the folder is missing, incomplete or not a causal language model.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {folder} has no config.json: give a folder in the transformers format")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(f"model folder {folder} has no *.safetensors file: save the model in that format")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=compute.attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers, safetensors and json raise many kinds, all of which mean the same here
        first_line = (str(error).splitlines() or [repr(error)])[0]
        raise ModelError(f"model folder {folder} cannot be loaded as a causal language model: {first_line}") from error
    # transformers only warns, and fills what is missing with random numbers.
    if problems := sorted(report["missing_keys"]) + sorted(key for key, *_ in report["mismatched_keys"]):
        raise ModelError(f"model folder {folder} lacks {len(problems)} of the model's tensors, such as {problems[0]}")
    # Dropout stays off while training too: with it the ratio of an unchanged policy would not be 1.
    return model.to(compute.device).eval()


class Trunk:
    """A decoder without its output head: token ids in, hidden states out."""

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        self.module = module
        self.compute = compute
        self._takes_positions = "position_ids" in inspect.signature(module.forward).parameters

    @classmethod
    def of(cls, model: Any, compute: Compute) -> Trunk:
        """The part of a causal language model below its head."""
        if model.base_model is model:
            raise ModelError(f"{type(model).__name__} does not separate its output head from the layers below it")
        return cls(model.base_model, compute)

    def __call__(self, micro: MicroBatch) -> Tensor:
        """[R * W, H] float32 hidden states after the final norm.

        Rows are padded on the right, where a causal model cannot look: they need no mask, which leaves attention its
        fast path. transformers finds packed trajectories by the restart of the positions.
        """
        positions = {} if micro.position_ids is None else {"position_ids": micro.position_ids}
        if positions and not self._takes_positions:
            raise ModelError(f'{type(self.module).__name__} takes no position ids: set learner.layout = "rows"')
        with self.precision():
            output = self.module(input_ids=micro.input_ids, use_cache=False, **positions)
        hidden: Tensor = output.last_hidden_state
        return hidden.flatten(0, 1).float()

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Autocast, or nothing in float32."""
        if self.compute.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.compute.device.type, dtype=self.compute.dtype)

    def layers(self) -> nn.ModuleList:
        """The decoder layers, first to last."""
        lists = [child for child in self.module.children() if isinstance(child, nn.ModuleList)]
        if not lists:
            raise ModelError(f"{type(self.module).__name__} keeps its decoder layers where they are not found")
        return max(lists, key=len)


def checkpoint_weights(model: Any, names: set[str]) -> dict[str, Tensor]:
    """Detached parameters and stored buffers under the names of the model's checkpoint; a tied head is left out.

    Args:
        names: of `checkpoint_names`.

    Raises:
        ModelError: the model's parameters cannot be given those names.
    """
    tied = model.all_tied_weights_keys
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    if set(weights) != names:  # transformers has renamed, fused or split tensors while loading
        weights = revert_weight_conversion(model, weights)
    if set(weights) != names:
        wrong = sorted(set(weights) ^ names)
        raise ModelError(
            f"{type(model).__name__}: {len(wrong)} tensors such as {wrong[0]} differ from the checkpoint's"
        )
    return weights


def checkpoint_names(folder: Path, model: Any) -> set[str]:
    """Names in the headers of the safetensors files of `folder`, without tensors that are tied to others."""
    names = {name for file in folder.glob("*.safetensors") for name in shapes_in_header(file)}
    return names - set(model.all_tied_weights_keys)
