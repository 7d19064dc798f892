"""Numbers about one learner step, under the names of `common/run_metrics.py`."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from common.run_metrics import STALENESS_BUCKETS, staleness_bucket_name
from learner.batching import TokenBatch
from learner.importance import log_ratio
from learner.objectives import kl_estimates

StepMetrics = dict[str, float]


class Stopwatch:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the previous lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def describe_batch(batch: TokenBatch, version: int) -> StepMetrics:
    """Rewards, lengths and staleness."""
    staleness = version - batch.weight_versions
    metrics = {
        "batch/trajectories": float(batch.num_seqs),
        "batch/tokens": float(len(batch.token_ids)),
        "batch/sampled_tokens": float(batch.num_tokens),
        "batch/reward_mean": float(batch.rewards.mean()),
        "batch/reward_std": float(batch.rewards.std(correction=0)),
        "batch/truncated_share": float(batch.truncated.double().mean()),
        "batch/response_tokens_mean": batch.num_tokens / batch.num_seqs,
        "staleness/mean": float(staleness.double().mean()),
        "staleness/max": float(staleness.max()),
    }
    for lowest, highest in STALENESS_BUCKETS:
        inside = (staleness >= lowest) & (staleness <= (highest if highest is not None else staleness.max()))
        metrics[staleness_bucket_name(lowest, highest)] = float(inside.sum())
    return metrics


def describe_policy(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> StepMetrics:
    """Distance of the current policy from the one that sampled; all [N]. Tokens of non-finite ratio are left out."""
    log_ratios = log_ratio(logprobs, rollout_logprobs)
    metrics = {
        "policy/advantage_mean": float(advantages.double().mean()),
        "policy/advantage_std": float(advantages.double().std(correction=0)),
    }
    usable = torch.isfinite(log_ratios)
    if usable.any():
        size = log_ratios[usable].abs()
        # The tokens are the behaviour policy's, so that k3 of (behaviour, current) estimates KL(behaviour || current).
        divergences = kl_estimates(rollout_logprobs[usable], logprobs[usable], "k3")
        metrics["policy/log_ratio_abs_mean"] = float(size.mean())
        metrics["policy/log_ratio_abs_max"] = float(size.max())
        metrics["policy/kl_behaviour"] = float(divergences.mean())
        metrics["policy/entropy_estimate"] = -float(logprobs[usable].mean())
    return metrics
