"""Learning of the value function from a batch, and the advantages it gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.config import RunConfig
from learner.advantages import explained_variance, moments
from learner.batching import MicroBatch, TokenBatch
from learner.objectives import token_weights, value_loss
from learner.optimizer import NoUpdate, Optimizer
from learner.returns import advantages_and_returns, length_adaptive_lambda
from learner.segments import segment_count, segment_mean, segment_sum
from learner.step_metrics import StepMetrics, describe_values
from learner.trunk import Compute, Trunk
from learner.value import PolicyHead, ValueFunction, ValueModel


class Estimates(NamedTuple):
    """Both [N], reward units."""

    advantages: Tensor
    targets: Tensor


def make_value_function(config: RunConfig, folder: Path, compute: Compute, policy: Trunk) -> ValueFunction | None:
    """As `algorithm.value` says; begun from the model in `folder`."""
    kind = config.algorithm.value
    if kind == "own_model":
        return ValueModel(folder, compute, freeze_attention=config.value.freeze_attention)
    if kind == "policy_head":
        width = policy.module.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        return PolicyHead(policy, width, seed=config.seed)
    assert kind == "none"
    return None


class ValueLearner:
    """K updates on a batch, then values and advantages."""

    def __init__(self, config: RunConfig, value: ValueFunction, optimizer: Optimizer) -> None:
        self._algorithm = config.algorithm
        self._settings = config.value
        self._max_norm = config.learner.max_grad_norm
        self._value = value
        self._optimizer = optimizer
        self._bootstraps = config.algorithm.advantage == "gae" and config.algorithm.length_stop == "bootstrap"

    def learn(self, batch: TokenBatch, micros: Sequence[MicroBatch], metrics: StepMetrics) -> None:
        """K updates on the same targets: mean squared error over all sampled tokens of the batch.

        Raises:
            NoUpdate: a gradient is not finite.
        """
        self._value.start(micros)
        before, targets = self._targets(batch, micros)
        weights = self._weights(batch)
        for repeat in range(self._settings.updates_per_batch):
            total = 0.0
            seen = torch.zeros_like(targets)
            for index, micro in enumerate(micros):
                values = self._value.values(index).before
                loss, _ = value_loss(
                    self._of_turns(values, batch, micro.tokens),
                    targets[micro.tokens],
                    weights[micro.tokens],
                    old_values=None if self._settings.clip_range is None else before[micro.tokens],
                    clip_range=self._settings.clip_range,
                )
                loss.backward()
                total += float(loss.detach())
                seen[micro.tokens] = values.detach()
            if repeat == 0:
                describe_first(seen, targets, batch, metrics)
            norms = self._optimizer.gradient_norms()
            norm = math.sqrt(sum(part * part for part in norms.values()))
            metrics["value/loss"], metrics["value/grad_norm"] = total, norm
            metrics.update({f"value/grad_norm_{block}": part for block, part in norms.items() if math.isfinite(part)})
            if not math.isfinite(norm):
                raise NoUpdate(f"the value function's gradient norm is {norm}")
            self._optimizer.step(learning_rate=self._settings.learning_rate, norm=norm, max_norm=self._max_norm)

    def advantages(self, batch: TokenBatch, micros: Sequence[MicroBatch]) -> Tensor:
        """[N], of the policy, with the value function as it is now."""
        return self._estimate(batch, *self._values(batch, micros)).advantages

    def one_step(self, batch: TokenBatch, micros: Sequence[MicroBatch], token_rewards: Tensor) -> Tensor:
        """[N], token_rewards + gamma V_next - V: Hybrid GRPO's, with rewards of its own."""
        values, _ = self._values(batch, micros)
        everywhere = torch.ones_like(values, dtype=torch.bool)
        gamma = self._algorithm.gamma
        return advantages_and_returns(
            values, token_rewards, batch.seq_ids, everywhere, gamma=gamma, lam_policy=0.0, lam_value=0.0
        )[0]

    def _targets(self, batch: TokenBatch, micros: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        """(values before the batch, targets), [N] each, fixed for all updates on this batch.

        A plain return needs no values, which saves a pass; they are 0 then.
        """
        clips = self._settings.clip_range is not None
        if self._algorithm.value_lambda < 1.0 or self._bootstraps or clips:
            values, bootstrap = self._values(batch, micros)
        else:
            values, bootstrap = torch.zeros_like(batch.rollout_logprobs), None
        return values, self._estimate(batch, values, bootstrap).targets

    @torch.no_grad()
    def _values(self, batch: TokenBatch, micros: Sequence[MicroBatch]) -> tuple[Tensor, Tensor | None]:
        """Values before each sampled token [N]; and, to bootstrap from, after the last one of cut trajectories [S]."""
        before = torch.zeros_like(batch.rollout_logprobs)
        final = torch.zeros_like(batch.rewards) if self._bootstraps else None
        for index, micro in enumerate(micros):
            values = self._value.values(index)
            before[micro.tokens] = values.before
            if final is not None:
                final[micro.seqs] = torch.where(batch.truncated[micro.seqs], values.final.double(), 0.0)
        return before, final

    def _estimate(self, batch: TokenBatch, values: Tensor, bootstrap: Tensor | None) -> Estimates:
        if self._settings.granularity == "token":
            return self._gae(values, batch.token_rewards, batch.seq_ids, bootstrap)
        turns = batch.turn_ids
        seqs = batch.seq_ids[batch.last_of_turns()]
        estimates = self._gae(
            self._turn_values(values, batch), segment_sum(batch.token_rewards, turns), seqs, bootstrap
        )
        return Estimates(estimates.advantages[turns], estimates.targets[turns])

    def _gae(self, values: Tensor, rewards: Tensor, seq_ids: Tensor, bootstrap: Tensor | None) -> Estimates:
        """Over steps of any kind, [M] each."""
        algorithm = self._algorithm
        everywhere = torch.ones_like(values, dtype=torch.bool)
        lam_policy: Tensor | float
        if algorithm.policy_lambda == "length_adaptive":
            lam_policy = length_adaptive_lambda(segment_count(seq_ids, everywhere), algorithm.lambda_alpha)
        else:
            lam_policy = algorithm.policy_lambda
        return Estimates(
            *advantages_and_returns(
                values,
                rewards,
                seq_ids,
                everywhere,
                gamma=algorithm.gamma,
                lam_policy=lam_policy,
                lam_value=algorithm.value_lambda,
                bootstrap=bootstrap,
            )
        )

    def _turn_values(self, values: Tensor, batch: TokenBatch) -> Tensor:
        """[number of turns]."""
        if self._settings.granularity == "turn_last":
            return values[batch.last_of_turns()]
        everywhere = torch.ones_like(values, dtype=torch.bool)
        return segment_mean(values, batch.turn_ids, everywhere)

    def _of_turns(self, values: Tensor, batch: TokenBatch, tokens: Tensor) -> Tensor:
        """[n]; in place of each token's value its turn's mean, if that is what is learned. Turns are never cut."""
        if self._settings.granularity != "turn_mean":
            return values
        _, turns = torch.unique(batch.turn_ids[tokens], return_inverse=True)
        return segment_mean(values, turns, torch.ones_like(turns, dtype=torch.bool))[turns]

    def _weights(self, batch: TokenBatch) -> Tensor:
        """[N]; a mean over the sampled tokens, or over those whose value is that of their turn."""
        trained = torch.ones_like(batch.seq_ids, dtype=torch.bool)
        if self._settings.granularity == "turn_last":
            trained = torch.zeros_like(trained)
            trained[batch.last_of_turns()] = True
        return token_weights(
            trained, batch.seq_ids, "token_mean", num_tokens=float(trained.sum()), num_seqs=batch.num_seqs
        )


def describe_first(values: Tensor, targets: Tensor, batch: TokenBatch, metrics: StepMetrics) -> None:
    """Metrics of the values before the batch was learned from."""
    everywhere = torch.ones_like(targets, dtype=torch.bool)
    explained = explained_variance(moments(targets - values, everywhere), moments(targets, everywhere))
    metrics["value/mean"] = float(values.mean())
    metrics["value/return_mean"] = float(targets.mean())
    if torch.isfinite(explained):
        metrics["value/explained_variance"] = float(explained)
    metrics.update(describe_values(values, targets, batch))
