"""Advantages of a batch: one function for each `algorithm.advantage`, chosen from a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.algorithm_config import GROUP_ADVANTAGES, AlgorithmConfig
from learner.advantages import (
    STD_FLOOR,
    group_advantages,
    mean_and_variance,
    moments,
    optimal_baseline,
    smoothed_advantages,
    whiten,
)
from learner.batching import MicroBatch, TokenBatch
from learner.implicit import implicit_rewards
from learner.importance import finite_log_ratio, log_ratio
from learner.prompt_memory import PromptMemory
from learner.returns import gae, rewards_at_last_token
from learner.scoring import Scores
from learner.segments import segment_sum
from learner.step_metrics import StepMetrics
from learner.value_learner import ValueLearner


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What advantages are made from. Parts that the recipe does not ask for are None."""

    algorithm: AlgorithmConfig
    batch: TokenBatch
    micros: Sequence[MicroBatch]
    prompts: Sequence[str]  # [S]
    scores: Scores | None  # of the policy before the update
    value: ValueLearner | None
    memory: PromptMemory | None
    gradient_norms: Callable[[], tuple[Tensor, Tensor]]  # see PolicyLearner.score_gradients; costs a pass


def compute_advantages(evidence: Evidence, metrics: StepMetrics) -> Tensor:
    """[N] float32, of each sampled token, whitened if the recipe says so."""
    algorithm, batch = evidence.algorithm, evidence.batch
    advantages = ADVANTAGES[algorithm.advantage](evidence)
    if algorithm.advantage in GROUP_ADVANTAGES:
        metrics.update(describe_groups(batch))
    if advantages.shape == batch.rewards.shape and advantages.shape != batch.seq_ids.shape:
        raise AssertionError("advantages are of tokens")
    return WHITENING[algorithm.whitening](advantages, batch)


def describe_groups(batch: TokenBatch) -> StepMetrics:
    """How many groups there are, and how many of them have rewards that do not differ."""
    informative = group_advantages(batch.rewards, batch.group_ids, scale="none").informative
    groups = len(set(batch.group_ids.tolist()))
    taught = len(set(batch.group_ids[informative].tolist()))
    return {"batch/groups": float(groups), "batch/uninformative_groups": float(groups - taught)}


def _of_tokens(advantages: Tensor, batch: TokenBatch) -> Tensor:
    """[N] float32, from one for each trajectory ([S])."""
    return advantages[batch.seq_ids].float()


# --- learned value ---


def _gae(evidence: Evidence) -> Tensor:
    assert evidence.value is not None
    return evidence.value.advantages(evidence.batch, evidence.micros)


def _hybrid(evidence: Evidence) -> Tensor:
    """The group's mean reward, given at the last token, in a one-step advantage."""
    assert evidence.value is not None
    batch = evidence.batch
    rewards = batch.rewards
    if evidence.algorithm.reward_squash == "tanh":
        rewards = group_advantages(rewards, batch.group_ids, scale="population_std").advantages.tanh()
    _, groups = torch.unique(batch.group_ids, return_inverse=True)
    means = segment_sum(rewards, groups) / segment_sum(torch.ones_like(rewards), groups)
    everywhere = torch.ones_like(batch.seq_ids, dtype=torch.bool)
    return evidence.value.one_step(
        batch, evidence.micros, rewards_at_last_token(means[groups], batch.seq_ids, everywhere)
    )


# --- groups ---


def _group_mean(evidence: Evidence) -> Tensor:
    batch = evidence.batch
    return _of_tokens(group_advantages(batch.rewards, batch.group_ids, scale="none").advantages, batch)


def _group_mean_std(evidence: Evidence) -> Tensor:
    batch = evidence.batch
    return _of_tokens(group_advantages(batch.rewards, batch.group_ids, scale="std").advantages, batch)


def _leave_one_out(evidence: Evidence) -> Tensor:
    batch = evidence.batch
    result = group_advantages(batch.rewards, batch.group_ids, scale="none", leave_one_out=True)
    return _of_tokens(result.advantages, batch)


def _least_variance(evidence: Evidence) -> Tensor:
    """VCPO: in each group the baseline that makes the variance of its gradient least."""
    batch = evidence.batch
    squared_norms, log_weights = evidence.gradient_norms()
    advantages = torch.zeros_like(batch.rewards)
    informative = group_advantages(batch.rewards, batch.group_ids, scale="none").informative
    for group in batch.group_ids.unique().tolist():
        members = batch.group_ids == group
        weights = (log_weights[members] - log_weights[members].max()).exp()  # the baseline does not see their scale
        baseline = optimal_baseline(weights, squared_norms[members], batch.rewards[members])
        advantages[members] = batch.rewards[members] - baseline
    return _of_tokens(torch.where(informative, advantages, 0.0), batch)


def _smoothed(evidence: Evidence) -> Tensor:
    """DCPO: standardised by this step's rewards and by all rewards of the prompt so far, smoothly blended."""
    assert evidence.memory is not None
    batch = evidence.batch
    new = group_advantages(batch.rewards, batch.group_ids, scale="std").advantages
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group_ids.unique().tolist():
        members = batch.group_ids == group
        prompt = evidence.prompts[int(members.nonzero()[0])]
        visits, *past = evidence.memory.past_moments(prompt)
        rewards = batch.rewards[members]
        everyone = torch.ones_like(rewards, dtype=torch.bool)
        mean, variance = mean_and_variance(moments(rewards, everyone) + rewards.new_tensor(past), bessel=True)
        total = torch.where(variance > 0, (rewards - mean) / (variance.sqrt() + STD_FLOOR), 0.0)
        advantages[members] = smoothed_advantages(new[members], total, visits + 1)
    return _of_tokens(advantages, batch)


def _implicit(evidence: Evidence) -> Tensor:
    """VIMPO: GAE of the policy's own log ratios to the starting model as rewards, values 0."""
    algorithm, batch, scores = evidence.algorithm, evidence.batch, evidence.scores
    assert scores is not None
    assert scores.logprobs is not None
    assert scores.ref_logprobs is not None
    assert scores.full_kl is not None
    rewards = implicit_rewards(scores.logprobs, scores.ref_logprobs, scores.full_kl, algorithm.implicit_beta)
    usable = torch.isfinite(rewards)
    assert algorithm.policy_lambda != "length_adaptive"
    return gae(
        torch.zeros_like(rewards),
        torch.where(usable, rewards, 0.0),
        batch.seq_ids,
        torch.ones_like(usable),
        gamma=algorithm.gamma,
        lam=algorithm.policy_lambda,
    )


# --- the batch, and what is remembered ---


def _return(evidence: Evidence) -> Tensor:
    """Discounted sum of the rewards from each token on."""
    batch = evidence.batch
    values = torch.zeros_like(batch.rollout_logprobs)
    everywhere = torch.ones_like(values, dtype=torch.bool)
    return gae(values, batch.token_rewards, batch.seq_ids, everywhere, gamma=evidence.algorithm.gamma, lam=1.0)


def _remembered(evidence: Evidence) -> Tensor:
    """Reward minus the prompt's baseline; minus the batch's mean reward for a prompt that is new."""
    assert evidence.memory is not None
    batch = evidence.batch
    baselines = evidence.memory.baselines(evidence.prompts, unknown=float(batch.rewards.mean()))
    return _of_tokens(batch.rewards - baselines.to(batch.rewards.device), batch)


ADVANTAGES: Mapping[str, Callable[[Evidence], Tensor]] = {
    "gae": _gae,
    "hybrid": _hybrid,
    "group_mean": _group_mean,
    "group_mean_std": _group_mean_std,
    "leave_one_out": _leave_one_out,
    "least_variance": _least_variance,
    "smoothed": _smoothed,
    "implicit": _implicit,
    "return": _return,
    "running_mean": _remembered,
    "success_rate": _remembered,
    "optimal_value": _remembered,
}


# --- whitening ---


def _not_whitened(advantages: Tensor, batch: TokenBatch) -> Tensor:
    return advantages


def _whiten_tokens(advantages: Tensor, batch: TokenBatch) -> Tensor:
    return whiten(advantages, torch.ones_like(advantages, dtype=torch.bool), bessel=True)


def _whiten_trajectories(advantages: Tensor, batch: TokenBatch) -> Tensor:
    """Mean and deviation over trajectories, each with the mean of its tokens' advantages."""
    everywhere = torch.ones_like(batch.seq_ids, dtype=torch.bool)
    counts = segment_sum(everywhere.double(), batch.seq_ids)
    means = segment_sum(advantages.double(), batch.seq_ids) / counts
    mean, variance = mean_and_variance(moments(means, torch.ones_like(means, dtype=torch.bool)), bessel=True)
    whitened = (advantages.double() - mean) / (variance.sqrt() + 1e-8)
    return torch.where(variance > 0, whitened, 0.0).to(advantages.dtype)


WHITENING: Mapping[str, Callable[[Tensor, TokenBatch], Tensor]] = {
    "none": _not_whitened,
    "tokens": _whiten_tokens,
    "trajectories": _whiten_trajectories,
}


def sequence_log_weights(logprobs: Tensor, rollout_logprobs: Tensor, seq_ids: Tensor) -> Tensor:
    """[S] float64, log of the product of ratios to the behaviour policy; -inf where one is not finite."""
    x = log_ratio(logprobs.detach(), rollout_logprobs)
    _, finite = finite_log_ratio(x)
    total = segment_sum(torch.where(finite, x, 0.0).double(), seq_ids)
    broken = segment_sum((~finite).double(), seq_ids)
    return torch.where(broken > 0, -torch.inf, total)
