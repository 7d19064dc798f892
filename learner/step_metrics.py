"""Numbers about one learner step, under the names of `common/run_metrics.py`."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from common.run_metrics import STALENESS_BUCKETS, staleness_bucket_name
from learner.batching import TokenBatch
from learner.importance import log_ratio, ratio_metrics
from learner.segments import segment_count

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
    everywhere = torch.ones_like(log_ratios, dtype=torch.bool)
    sums = {name: float(value) for name, value in ratio_metrics(log_ratios, everywhere).items()}
    metrics = {
        "policy/advantage_mean": float(advantages.double().mean()),
        "policy/advantage_std": float(advantages.double().std(correction=0)),
        "policy/nonfinite_tokens": sums["ratio/nonfinite_tokens"],
    }
    if count := sums["ratio/tokens"]:
        usable = torch.isfinite(log_ratios)
        metrics["policy/log_ratio_abs_mean"] = sums["ratio/abs_log_sum"] / count
        metrics["policy/log_ratio_square_mean"] = sums["ratio/squared_log_sum"] / count
        metrics["policy/log_ratio_abs_max"] = float(log_ratios[usable].abs().max())
        metrics["policy/kl_behaviour"] = sums["ratio/k3_sum"] / count
        metrics["policy/entropy_estimate"] = -float(logprobs[usable].mean())
    return metrics


THIRDS = ("first", "middle", "last")


def describe_values(values: Tensor, targets: Tensor, batch: TokenBatch) -> StepMetrics:
    """Where in a trajectory values are off; [N] both."""
    counts = segment_count(batch.seq_ids, torch.ones_like(batch.seq_ids, dtype=torch.bool))
    firsts = torch.from_numpy(batch.bounds[:-1]).to(batch.seq_ids.device)
    places = torch.arange(len(values), device=values.device) - firsts[batch.seq_ids]
    third = (3 * places / counts[batch.seq_ids]).long().clamp(max=2)
    sums = torch.zeros(3, dtype=torch.float64, device=values.device)
    sums.index_add_(0, third, (values - targets).double())
    sizes = torch.bincount(third, minlength=3)
    biases = zip(THIRDS, sums.tolist(), sizes.tolist(), strict=True)
    return {f"value/bias_{name}_third": total / size for name, total, size in biases if size}
