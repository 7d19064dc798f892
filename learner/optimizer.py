"""AdamW over named parameters, with the gradient's norm checked before anything moves, and an undo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
# Parts of a decoder by the names of its modules, as model families call them; what is in none of them is a norm.
BLOCKS = {
    "head": {"head", "lm_head"},
    "embeddings": {"embed_tokens", "wte", "wpe", "embeddings", "embed_in"},
    "attention": {"self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer"},
    "mlp": {"mlp", "feed_forward", "ffn", "experts", "moe", "block_sparse_moe"},
}


class NoUpdate(Exception):
    """The batch cannot be learned from; everything must be as it was before it."""


class Optimizer:
    """AdamW and gradient clipping for the parameters that ask for a gradient.

    Source: arXiv 1711.05101. Moments exist from the start, so that saving, restoring and undoing have one shape.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._adam = torch.optim.AdamW(self._parameters.values(), betas=betas, weight_decay=weight_decay, fused=True)
        for parameter in self._parameters.values():
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
        self._saved: list[Tensor] = []

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters.values())

    def gradient_norm(self) -> float:
        """Euclidean norm over all gradients; a parameter that the loss did not reach counts as 0."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @torch.no_grad()
    def gradient_norms(self) -> dict[str, float]:
        """Norm of the gradient in each block of a decoder that has one; their squares add up to the whole's."""
        reached = {name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None}
        if not reached:
            return {}
        squares: dict[str, list[Tensor]] = {}
        for name, norm in zip(reached, torch._foreach_norm(list(reached.values())), strict=True):
            squares.setdefault(block_of(name), []).append(norm.square())
        sums = torch.stack([torch.stack(parts).sum() for parts in squares.values()]).sqrt().tolist()
        return dict(zip(squares, sums, strict=True))

    def gradient_sample(self, size: int) -> Tensor:
        """About `size` entries of the gradient at fixed places, spread over all parameters; [<= size], a copy.

        A parameter that the loss did not reach counts as 0.
        """
        stride = max(1, math.ceil(self.num_parameters / size))
        return torch.cat(
            [
                (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()[::stride]
                for parameter in self._parameters.values()
            ]
        )

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return list(self._parameters.values())

    def step(self, *, learning_rate: float, norm: float, max_norm: float) -> None:
        """One update with the accumulated gradients, scaled down to `max_norm` if `norm` exceeds it; clears them.

        Args:
            norm: of `gradient_norm`; finite.
        """
        if norm > max_norm:
            gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
            torch._foreach_mul_(gradients, max_norm / norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def remember(self) -> None:
        """Copy parameters and moments to host memory, for `undo`."""
        if not self._saved:
            self._saved = [torch.empty_like(tensor, device="cpu") for tensor in self._state()]
        for copy, tensor in zip(self._saved, self._state(), strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def undo(self) -> None:
        """Put parameters and moments back, bit for bit, to the last `remember`."""
        for copy, tensor in zip(self._saved, self._state(), strict=True):
            tensor.copy_(copy)
        self.discard_gradients()

    def _state(self) -> list[Tensor]:
        return [
            tensor
            for parameter in self._parameters.values()
            for tensor in (parameter.detach(), *(self._adam.state[parameter][key] for key in ("step", *MOMENTS)))
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Moments and step counts by `<key>/<parameter name>`."""
        return {
            f"{key}/{name}": self._adam.state[parameter][key]
            for name, parameter in self._parameters.items()
            for key in ("step", *MOMENTS)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `tensors`.

        Raises:
            KeyError: a parameter's state is missing; the model is another one.
        """
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


def block_of(name: str) -> str:
    """Block of `BLOCKS` that a parameter belongs to, or `norm`."""
    places = set(name.split("."))
    return next((block for block, names in BLOCKS.items() if not names.isdisjoint(places)), "norm")
