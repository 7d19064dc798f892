"""The policy: log-probs of sampled tokens without ever holding all logits, and its weights under checkpoint names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from common.errors import ModelError
from learner.batching import Layout, MicroBatch, TokenBatch
from learner.probe import verify
from learner.trunk import Compute, Trunk, checkpoint_names, checkpoint_weights, load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TokenScores(NamedTuple):
    """What the policy says about the sampled tokens of a micro-batch."""

    logprobs: Tensor  # [n] float32, nats, of the distribution at the trajectory's temperature
    entropies: Tensor | None  # [n] float32, nats, of that distribution


class Policy:
    """A causal language model with float32 weights.

    Raises (on construction):
        ModelError: the folder cannot be used, or the model computes its logits in a way that is not understood.
    """

    def __init__(
        self,
        folder: Path,
        compute: Compute,
        *,
        trainable_layers: int | None,
        logprob_chunk_tokens: int,
        layout: Layout,
    ) -> None:
        self.folder = folder
        self.model = load_model(folder, compute)
        self.trunk = Trunk.of(self.model, compute)
        self._chunk_tokens = logprob_chunk_tokens
        config = self.model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma
        # Cohere multiplies, Granite divides
        self._scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self._names = checkpoint_names(folder, self.model)
        checkpoint_weights(self.model, self._names)
        if trainable_layers is not None:
            self._freeze_below(trainable_layers)
        verify(self, layout)

    def _freeze_below(self, trainable_layers: int) -> None:
        layers = self.trunk.layers()
        if trainable_layers > len(layers):
            raise ModelError(f"learner.trainable_layers = {trainable_layers}, and the model has {len(layers)} layers")
        # Nothing below the first trained layer asks for a gradient, so that torch records no graph there.
        self.model.requires_grad_(False)
        for layer in layers[-trainable_layers:]:
            layer.requires_grad_(True)

    def scores(self, micro: MicroBatch, batch: TokenBatch, *, with_entropies: bool = False) -> TokenScores:
        """Log-probs, and entropies if asked for, of the sampled tokens of `micro`, in the order of `micro.tokens`."""
        return self.score_states(self.states(micro), *targets_of(micro, batch), with_entropies=with_entropies)

    def states(self, micro: MicroBatch) -> Tensor:
        """[n, H] float32, hidden states before each sampled token of `micro`."""
        return self.trunk(micro).index_select(0, micro.states)

    def score_states(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, with_entropies: bool = False
    ) -> TokenScores:
        """Log-probs of `targets` ([n] int64) after the states `hidden` ([n, H]).

        At most `logprob_chunk_tokens` rows of logits exist at a time: with more, each chunk is computed again in the
        backward pass.

        Args:
            temperatures: [n]; None: 1.
        """
        size = self._chunk_tokens
        if len(targets) <= size:
            return self._score_chunk(hidden, targets, temperatures, with_entropies)
        pieces = []
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            scale = None if temperatures is None else temperatures[part]
            arguments = (hidden[part], targets[part], scale, with_entropies)
            pieces.append(checkpoint(self._score_chunk, *arguments, use_reentrant=False))
        entropies = torch.cat([piece.entropies for piece in pieces]) if with_entropies else None
        return TokenScores(torch.cat([piece.logprobs for piece in pieces]), entropies)

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, with_entropies: bool
    ) -> TokenScores:
        logits = self.logits(hidden)
        if temperatures is not None:
            logits = logits / temperatures[:, None]  # logits, not log-probs: dividing those would not be a distribution
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        if not with_entropies:
            return TokenScores(logprobs, None)
        probs = (logits - normaliser[:, None]).exp()
        return TokenScores(logprobs, normaliser - (probs * logits).sum(-1))

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] float32, from states [n, H]. In float32 also where the trunk is not: rounding here becomes
        noise in every ratio."""
        logits: Tensor = self.model.get_output_embeddings()(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def checkpoint_weights(self) -> dict[str, Tensor]:
        """Detached parameters under the names of the model's checkpoint; a tied head is left out."""
        return checkpoint_weights(self.model, self._names)

    @torch.no_grad()
    def served_logprobs(self, token_ids: Sequence[int], dtype: torch.dtype) -> list[float]:
        """Log-probs of token_ids[1:] at temperature 1 by the model as engines serve it: weights rounded to `dtype`.

        Returns:
            len(token_ids) - 1 numbers, nats.
        """
        ids = torch.tensor([token_ids], device=self.model.device)
        if dtype == torch.float32:
            logits = self.model(input_ids=ids, use_cache=False).logits
        else:
            rounded = {name: weight.to(dtype) for name, weight in self.model.named_parameters()}
            logits = functional_call(self.model, rounded, kwargs={"input_ids": ids, "use_cache": False}).logits
        logprobs = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])
        return [float(x) for x in logprobs.squeeze(-1)]

    @torch.no_grad()
    def divergence(self, hidden: Tensor, other: Policy, other_hidden: Tensor, temperatures: Tensor | None) -> Tensor:
        """[n] float32, nats: exact KL(this policy || other) over the vocabulary after given states ([n, H] each).

        At most `logprob_chunk_tokens` rows of each one's logits exist at a time.
        """
        pieces = []
        for start in range(0, len(hidden), self._chunk_tokens):
            part = slice(start, start + self._chunk_tokens)
            logits, other_logits = self.logits(hidden[part]), other.logits(other_hidden[part])
            if temperatures is not None:
                logits, other_logits = logits / temperatures[part, None], other_logits / temperatures[part, None]
            logprobs = logits.log_softmax(-1)
            pieces.append((logprobs.exp() * (logprobs - other_logits.log_softmax(-1))).sum(-1))
        return torch.cat(pieces)


def targets_of(micro: MicroBatch, batch: TokenBatch) -> tuple[Tensor, Tensor | None]:
    """Sampled tokens of `micro` ([n] int64), and their temperatures ([n]; None: all are 1)."""
    targets = batch.token_ids[batch.positions[micro.tokens]]
    return targets, batch.temperatures[micro.tokens] if batch.tempered else None
