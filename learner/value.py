"""The value function: a model of its own, or a head on the policy's trunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from common.errors import ModelError
from learner.batching import MicroBatch
from learner.optimizer import block_of
from learner.trunk import Compute, Trunk, load_model


class StateValues(NamedTuple):
    """Expected return, in reward units."""

    before: Tensor  # [n] float32, of the state before each sampled token of a micro-batch
    final: Tensor  # [k] float32, of the state after the last sampled token; empty if the batch does not read it


class ValueFunction(Protocol):
    """Values of the states in the micro-batches of one batch."""

    def start(self, micros: Sequence[MicroBatch]) -> None:
        """Begin with a batch."""
        ...

    def values(self, index: int) -> StateValues:
        """Of micro-batch `index`; with a graph unless gradients are switched off."""
        ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """All parameters that are its own; those that train ask for a gradient."""
        ...


class ValueModel:
    """A decoder of its own with a scalar head, begun from the policy's starting model.

    The head starts at 0, weight and bias, so that the first values are 0 and not noise. With `freeze_attention`
    attention and embeddings stay as they are; feed-forward layers, norms and the head train: gradients of attention are
    what makes value training unstable. Source: SAO, arXiv 2607.07508; which parts of a dense model to freeze is ours.
    """

    def __init__(self, folder: Path, compute: Compute, *, freeze_attention: bool) -> None:
        model = load_model(folder, compute)
        self._trunk = Trunk.of(model, compute)
        embedding = model.get_input_embeddings()
        if freeze_attention:
            embedding.requires_grad_(False)
            freeze_attention_of(self._trunk.module)
        self._head = nn.Linear(embedding.weight.shape[1], 1, device=compute.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._micros: Sequence[MicroBatch] = ()

    def start(self, micros: Sequence[MicroBatch]) -> None:
        self._micros = micros

    def values(self, index: int) -> StateValues:
        micro = self._micros[index]
        return _split(self._head(self._trunk(micro).index_select(0, _read(micro))).squeeze(-1), micro)

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        yield from ((f"trunk.{name}", parameter) for name, parameter in self._trunk.module.named_parameters())
        yield from ((f"head.{name}", parameter) for name, parameter in self._head.named_parameters())


class PolicyHead:
    """A small network on the policy's final hidden states, which it reads and does not train.

    The policy does not change while the head learns from a batch, so that its states are computed once for all of the
    head's updates. The last layer starts at 0; the others are drawn from `seed`.
    """

    WIDTH = 128

    def __init__(self, trunk: Trunk, hidden_size: int, *, seed: int) -> None:
        self._trunk = trunk
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            last = nn.Linear(self.WIDTH, 1)
            layers = (nn.LayerNorm(hidden_size), nn.Linear(hidden_size, self.WIDTH), nn.SiLU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self._head = nn.Sequential(*layers).to(trunk.compute.device)
        self._micros: Sequence[MicroBatch] = ()
        self._states: list[Tensor] = []

    @torch.no_grad()
    def start(self, micros: Sequence[MicroBatch]) -> None:
        self._micros = micros
        self._states = [self._trunk(micro).index_select(0, _read(micro)) for micro in micros]

    def values(self, index: int) -> StateValues:
        return _split(self._head(self._states[index]).squeeze(-1), self._micros[index])

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._head.named_parameters()


def freeze_attention_of(module: nn.Module) -> None:
    inside = [parameter for name, parameter in module.named_parameters() if block_of(name) == "attention"]
    if not inside:
        raise ModelError(
            f"{type(module).__name__}: no attention is found to freeze: set value.freeze_attention = false"
        )
    for parameter in inside:
        parameter.requires_grad_(False)


def _read(micro: MicroBatch) -> Tensor:
    """[n + k] places of the states whose values are asked for."""
    return torch.cat((micro.states, micro.final_states))


def _split(values: Tensor, micro: MicroBatch) -> StateValues:
    n = len(micro.tokens)
    return StateValues(values[:n], values[n:])
