"""Passes over a whole batch without gradient: log-probs of the policy before an update, and of the starting model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithm_config import AlgorithmConfig, rejects_sequences, updates_per_batch
from learner.batching import MicroBatch, TokenBatch
from learner.policy import Policy, TokenScores, targets_of


class Scores(NamedTuple):
    """[N] float32 each, nats, at the trajectories' temperatures; constant. None: the recipe does not need it."""

    logprobs: Tensor | None  # of the policy before the update: the proximal log-probs
    ref_logprobs: Tensor | None  # of the starting model
    full_kl: Tensor | None  # exact KL(policy || starting model) over the vocabulary


class Comparison(NamedTuple):
    """Of the sampled tokens of a micro-batch, [n] each, nats."""

    scores: TokenScores  # with a graph unless gradients are switched off
    ref_logprobs: Tensor
    full_kl: Tensor  # constant


def needs_policy_pass(algorithm: AlgorithmConfig) -> bool:
    """Whether the recipe needs a pass before its updates.

    With one update on a batch the policy before it *is* the differentiated one, so that proximal log-probs are free.
    What looks at the whole batch at once, or shapes rewards, needs the pass even then.
    """
    shapes_rewards = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward"
    if shapes_rewards or algorithm.second_moment is not None or algorithm.loss == "implicit_value":
        return True
    uses_proximal = algorithm.loss != "optimal_value" and (
        algorithm.reference == "proximal"
        or (algorithm.correction != "none" and algorithm.reference != "interpolated")
        or rejects_sequences(algorithm)
        or algorithm.bounds == "probability"
    )
    return uses_proximal and updates_per_batch(algorithm) > 1


def compare(
    policy: Policy, reference: Policy, micro: MicroBatch, batch: TokenBatch, *, with_entropies: bool = False
) -> Comparison:
    """Log-probs of the policy and of the starting model, and the exact divergence between them."""
    targets, temperatures = targets_of(micro, batch)
    hidden = policy.states(micro)
    with torch.no_grad():
        ref_hidden = reference.states(micro)
        ref_logprobs = reference.score_states(ref_hidden, targets, temperatures).logprobs
    scores = policy.score_states(hidden, targets, temperatures, with_entropies=with_entropies)
    return Comparison(scores, ref_logprobs, policy.divergence(hidden, reference, ref_hidden, temperatures))


@torch.no_grad()
def score_batch(
    algorithm: AlgorithmConfig,
    policy: Policy,
    reference: Policy | None,
    batch: TokenBatch,
    micros: Sequence[MicroBatch],
) -> Scores:
    """What the recipe needs to know before its updates: a pass of the policy, of the starting model, both or none."""
    empty = torch.zeros_like(batch.rollout_logprobs)
    if algorithm.loss == "implicit_value":
        assert reference is not None
        compared = Scores(empty, empty.clone(), empty.clone())
        for micro in micros:
            comparison = compare(policy, reference, micro, batch)
            parts = (comparison.scores.logprobs, comparison.ref_logprobs, comparison.full_kl)
            for whole, part in zip(compared, parts, strict=True):
                assert whole is not None
                whole[micro.tokens] = part
        return compared
    logprobs = _logprobs(policy, batch, micros) if needs_policy_pass(algorithm) else None
    return Scores(logprobs, None if reference is None else _logprobs(reference, batch, micros), None)


def _logprobs(model: Policy, batch: TokenBatch, micros: Sequence[MicroBatch]) -> Tensor:
    logprobs = torch.zeros_like(batch.rollout_logprobs)
    for micro in micros:
        logprobs[micro.tokens] = model.scores(micro, batch).logprobs
    return logprobs
