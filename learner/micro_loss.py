"""The loss of one micro-batch, and what an optimizer update on a minibatch needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.config import RunConfig
from learner.advantages import group_advantages
from learner.batching import MicroBatch, TokenBatch
from learner.health import count_masked
from learner.implicit import a_star_loss, implicit_rewards, implicit_value_loss
from learner.importance import Band
from learner.objectives import Metrics, entropy_loss, kl_loss, nll_loss, policy_loss
from learner.policy import Policy, TokenScores
from learner.scoring import Scores, compare
from learner.segments import segment_mean
from learner.token_loss import Tokens, correction_of, kept_sequences, surrogate_of

MASKED = "masked by cell"  # of `count_masked`
MEANS = {  # sums of losses that are shown as means over tokens or trajectories, by their metric's name
    "entropy": "policy/entropy",
    "kl": "policy/kl_reference",
    "nll": "policy/nll",
    "implicit": "policy/implicit_error",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTask:
    """A batch that the policy is to learn from."""

    batch: TokenBatch
    micros: Sequence[MicroBatch]
    advantages: Tensor  # [N]
    scores: Scores  # before the update
    order: Sequence[int]  # trajectories in an order that does not depend on how they arrived
    version: int  # the learner's, that staleness is counted from


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """What one optimizer update sees: some trajectories, and the weights of tokens in its loss."""

    micros: Sequence[MicroBatch]
    seqs: Sequence[int]
    weights: Tensor  # [N]; 0 outside
    nll_weights: Tensor | None  # [N]; 0 but on correct trajectories
    band: Band | None = None  # found by a search; None: the configured bounds


@dataclass(slots=True)
class Tally:
    """Sums over the micro-batches of one update."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, parts: Mapping[str, Tensor]) -> None:
        for name, value in parts.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def usable(self) -> Tensor:
        """Tokens that are left in the loss."""
        counts = self.sums
        return counts["policy/tokens"] - counts["policy/rejected_tokens"] - counts["policy/masked_tokens"]


class MicroLoss:
    """Forward and backward pass of one micro-batch with the loss that `algorithm.loss` names."""

    def __init__(self, config: RunConfig, policy: Policy, reference: Policy | None) -> None:
        self._algorithm = config.algorithm
        self._staleness_bound = config.staleness.bound
        self._policy = policy
        self._reference = reference
        self._loss = LOSSES[config.algorithm.loss]

    def __call__(self, task: PolicyTask, minibatch: Minibatch, micro: MicroBatch, keep: Tensor, tally: Tally) -> Tensor:
        """Add to the gradients and to the tally; returns the log-probs, [n], constant.

        Args:
            keep: [N] bool; False rejects a token, whatever else happens.
        """
        loss, parts, scores = self._loss(self, task, minibatch, micro, keep)
        if scores.entropies is not None:
            bonus, entropy_parts = entropy_loss(scores.entropies, minibatch.weights[micro.tokens])
            loss = loss + self._algorithm.entropy_coefficient * bonus
            parts = {**parts, **entropy_parts}
        loss.backward()
        tally.add({**parts, "policy/loss": loss.detach().double()})
        return scores.logprobs.detach()

    @property
    def _with_entropies(self) -> bool:
        return self._algorithm.entropy_coefficient > 0

    def tokens(self, task: PolicyTask, micro: MicroBatch, logprobs: Tensor) -> Tokens:
        """The sampled tokens of a micro-batch as the components see them."""
        batch, at = task.batch, micro.tokens
        proximal = task.scores.logprobs
        return Tokens(
            logprobs=logprobs,
            rollout_logprobs=batch.rollout_logprobs[at],
            proximal_logprobs=None if proximal is None else proximal[at],
            advantages=task.advantages[at],
            seq_ids=batch.seq_ids[at],
            weight_versions=batch.weight_versions[at],
            current_version=task.version,
            staleness_bound=self._staleness_bound,
        )

    def policy_gradient(
        self, task: PolicyTask, minibatch: Minibatch, micro: MicroBatch, keep: Tensor
    ) -> tuple[Tensor, Metrics, TokenScores]:
        """Surrogate times advantage, and the regularisers."""
        algorithm, at = self._algorithm, micro.tokens
        scores = self._policy.scores(micro, task.batch, with_entropies=self._with_entropies)
        loss, parts = self._surrogate_loss(task, minibatch, micro, keep, scores.logprobs)
        if algorithm.kl_coefficient and algorithm.kl_in == "loss":
            assert task.scores.ref_logprobs is not None
            penalty, kl_parts = kl_loss(
                scores.logprobs,
                task.scores.ref_logprobs[at],
                minibatch.weights[at],
                algorithm.kl_estimator,
                sampler_logprobs=task.batch.rollout_logprobs[at] if algorithm.kl_corrected else None,
            )
            loss, parts = loss + algorithm.kl_coefficient * penalty, {**parts, **kl_parts}
        if minibatch.nll_weights is not None:
            imitation, nll_parts = nll_loss(scores.logprobs, minibatch.nll_weights[at])
            loss, parts = loss + algorithm.nll_coefficient * imitation, {**parts, **nll_parts}
        return loss, parts, scores

    def _surrogate_loss(
        self, task: PolicyTask, minibatch: Minibatch, micro: MicroBatch, keep: Tensor, logprobs: Tensor
    ) -> tuple[Tensor, Metrics]:
        algorithm, at = self._algorithm, micro.tokens
        tokens = self.tokens(task, micro, logprobs)
        surrogate = surrogate_of(algorithm, tokens, minibatch.band)
        correction = correction_of(algorithm, tokens)
        kept = keep[at] & kept_sequences(algorithm, tokens)
        weights = minibatch.weights[at]
        loss, parts = policy_loss(surrogate, tokens.advantages, weights, correction=correction, keep=kept)
        fresh = tokens.staleness <= self._staleness_bound
        moved = tokens.logprobs.detach() - tokens.rollout_logprobs
        table = count_masked(surrogate, moved, tokens.advantages, tokens.staleness, fresh, kept, correction)
        return loss, {**parts, MASKED: table}

    def implicit_value(
        self, task: PolicyTask, minibatch: Minibatch, micro: MicroBatch, keep: Tensor
    ) -> tuple[Tensor, Metrics, TokenScores]:
        """VIMPO: the value loss on the policy's own log ratios, and a weighted policy gradient."""
        algorithm, batch, at = self._algorithm, task.batch, micro.tokens
        assert self._reference is not None
        comparison = compare(self._policy, self._reference, micro, batch, with_entropies=self._with_entropies)
        terms = implicit_rewards(
            comparison.scores.logprobs, comparison.ref_logprobs, comparison.full_kl, algorithm.implicit_beta
        )
        seqs, own = torch.unique(batch.seq_ids[at], return_inverse=True)
        targets = torch.where(_kept_whole(keep[at], own), self._centred(task)[seqs], torch.nan)
        everywhere = torch.ones_like(own, dtype=torch.bool)
        loss, parts = implicit_value_loss(terms, targets, own, everywhere, num_seqs=len(minibatch.seqs))
        actor, actor_parts = self._surrogate_loss(task, minibatch, micro, keep, comparison.scores.logprobs)
        kl = {"kl/sum": comparison.full_kl.sum(), "kl/tokens": everywhere.sum()}
        return (
            loss + algorithm.actor_coefficient * actor,
            {**_as_mean(parts), **actor_parts, **kl},
            comparison.scores,
        )

    def _centred(self, task: PolicyTask) -> Tensor:
        """[S], reward minus the mean of its group."""
        return group_advantages(task.batch.rewards, task.batch.group_ids, scale="none").advantages

    def optimal_value(
        self, task: PolicyTask, minibatch: Minibatch, micro: MicroBatch, keep: Tensor
    ) -> tuple[Tensor, Metrics, TokenScores]:
        """A*-PO: regression of the summed log ratio to the starting model on the advantage, reward - V*."""
        batch, at = task.batch, micro.tokens
        assert task.scores.ref_logprobs is not None
        scores = self._policy.scores(micro, batch, with_entropies=self._with_entropies)
        seqs, own = torch.unique(batch.seq_ids[at], return_inverse=True)
        everywhere = torch.ones_like(own, dtype=torch.bool)
        advantages = segment_mean(task.advantages[at].double(), own, everywhere)
        loss, parts = a_star_loss(
            scores.logprobs,
            task.scores.ref_logprobs[at],
            torch.where(_kept_whole(keep[at], own), advantages, torch.nan),
            torch.zeros_like(advantages),
            own,
            everywhere,
            beta=self._algorithm.regression_beta,
            num_seqs=len(minibatch.seqs),
        )
        counts = {
            "policy/tokens": everywhere.sum(),
            "policy/rejected_tokens": (~keep[at]).sum(),
            "policy/masked_tokens": torch.zeros_like(seqs.sum()),
        }
        return loss, {**_as_mean(parts), **counts}, scores


def _kept_whole(keep: Tensor, seq_ids: Tensor) -> Tensor:
    """[number of sequences] bool: no token of it is rejected."""
    return segment_mean(keep.double(), seq_ids, torch.ones_like(keep)) == 1.0


def _as_mean(parts: Metrics) -> Metrics:
    return {"implicit/sum": parts["implicit/squared_error_sum"], "implicit/tokens": parts["implicit/seqs"]}


LossOfMicro = Callable[[MicroLoss, PolicyTask, Minibatch, MicroBatch, Tensor], tuple[Tensor, Metrics, TokenScores]]
LOSSES: Mapping[str, LossOfMicro] = {
    "policy_gradient": MicroLoss.policy_gradient,
    "implicit_value": MicroLoss.implicit_value,
    "optimal_value": MicroLoss.optimal_value,
}
