"""Losses of tokens and trajectories from their formulas, in float64 and plain Python; shares no code with learner/."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithm_config import AlgorithmConfig


class Sample(NamedTuple):
    """One trajectory as the loss sees it; lists over its sampled tokens."""

    logprobs: list[Tensor]
    behaviour: list[float]
    old: list[float]  # of the policy before the batch
    advantages: list[float]
    staleness: list[int]
    reward: float
    ref: list[float]  # of the starting model
    kl: list[float]  # exact, of the current policy
    fixed: list[bool]  # kept by the rules that are decided once for the batch


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def interpolated(sample: Sample) -> list[float]:
    out = []
    for lp, beh, age in zip(sample.logprobs, sample.behaviour, sample.staleness, strict=True):
        alpha = (age - 1) / age if age > 0 else 0.0
        out.append(beh + alpha * (float(lp.detach()) - beh))
    return out


def before(a: AlgorithmConfig, sample: Sample) -> list[float]:
    return interpolated(sample) if a.reference == "interpolated" else sample.old


def log_ratios(a: AlgorithmConfig, sample: Sample) -> list[Tensor]:
    reference = sample.behaviour if a.reference == "behaviour" else before(a, sample)
    own = [lp - ref for lp, ref in zip(sample.logprobs, reference, strict=True)]
    total = torch.stack(own).sum()
    if a.level == "sequence_product":
        return [total for _ in own]
    if a.level == "sequence":
        return [total / len(own) for _ in own]
    if a.level == "sequence_token":
        return [x - x.detach() + total.detach() / len(own) for x in own]
    return own


def bounds(a: AlgorithmConfig, sample: Sample, index: int, eta: int) -> tuple[float, float]:
    """As ratios."""
    age = sample.staleness[index]
    if a.bounds == "staleness_linear":
        share = min(1.0, max(0.0, age / max(eta, 1)))
        low = a.eps_low + (a.eps_low_stale - a.eps_low) * share
        return 1 - low, 1 + a.eps_high + (a.eps_high_stale - a.eps_high) * share
    if a.bounds == "staleness_table":
        low, high = a.eps_table[min(max(age, 0), len(a.eps_table) - 1)]
        return 1 - low, 1 + high
    if a.bounds == "probability":
        q = math.exp(before(a, sample)[index])
        low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * a.eps_low / q, 0.0))
        return min(low, 10.0), min(0.5 + 0.5 * math.sqrt(1 + 4 * a.eps_high / q), 10.0)
    return 1 - a.eps_low, 1 + a.eps_high


def searched_bounds(a: AlgorithmConfig, samples: Sequence[Sample]) -> tuple[float, float]:
    """BAPO's, as ratios."""
    pairs = []
    for sample in samples:
        ratios = [math.exp(float(x.detach())) for x in log_ratios(a, sample)]
        pairs += list(zip(ratios, sample.advantages, strict=True))
    low, high, step = 1 - a.eps_low, 1 + a.eps_high, 0
    while True:
        positive = sum(adv * r for r, adv in pairs if adv > 0 and r <= high)
        negative = sum(-adv * r for r, adv in pairs if adv < 0 and r >= low)
        if positive >= a.balance_target * negative or step == 2 * a.balance_steps:
            return low, high
        step += 1
        if step <= a.balance_steps:
            low += (a.eps_low - a.balance_eps_low) / a.balance_steps
        else:
            high += (a.balance_eps_high - a.eps_high) / a.balance_steps


def surrogate(
    a: AlgorithmConfig, x: Tensor, lp: Tensor, advantage: float, limits: tuple[float, float]
) -> tuple[Tensor, bool]:
    """(what the loss is minus the advantage times, whether it has a gradient)."""
    low, high = limits
    r = math.exp(float(x.detach()))
    nothing = torch.zeros((), dtype=torch.float64)
    if a.trust_region == "mask":
        return (r * lp, True) if low < r < high else (nothing, False)
    if a.trust_region == "clip":
        if advantage > 0 and r > high:
            return nothing + high, False
        if advantage < 0 and r < low:
            return nothing + low, False
        if advantage < 0 and a.dual_clip is not None and r > a.dual_clip:
            return nothing + a.dual_clip, False
        return x.exp(), True
    if a.trust_region == "truncate":
        return min(max(r, low), high) * lp, True
    if a.trust_region == "soft_gate":
        tau = a.tau_positive if advantage > 0 else a.tau_negative
        return 4 / tau / (1 + torch.exp(-tau * (x.exp() - 1))), True
    if a.trust_region == "gamma_weight":
        k, lam = a.gamma_negative if advantage < 0 else a.gamma_positive
        return math.exp(lam) * r**k * math.exp(-lam * r) * lp, True
    if a.trust_region == "probability_shift":
        p = math.exp(float(lp.detach()))
        shift = p - p / r
        if (advantage > 0 and shift > a.eps_high) or (advantage < 0 and shift < -a.eps_low):
            return nothing, False
        return min(r, 20.0) * lp, True
    assert a.trust_region == "none"
    return x.exp(), True


def corrections(a: AlgorithmConfig, sample: Sample) -> list[float]:
    rho = [math.exp(old - beh) for old, beh in zip(before(a, sample), sample.behaviour, strict=True)]
    if a.correction_level == "sequence":
        rho = [math.exp(mean([math.log(r) for r in rho]))] * len(rho)
    if a.correction_level == "sequence_product":
        rho = [math.prod(rho)] * len(rho)
    cap = math.inf if a.correction_high is None else a.correction_high
    if a.correction == "truncated":
        return [min(max(r, a.correction_low), cap) for r in rho]
    if a.correction == "banded":
        return [r if a.correction_low <= r <= cap else 0.0 for r in rho]
    return [1.0] * len(rho)


def is_rejected(a: AlgorithmConfig, sample: Sample) -> bool:
    """The whole trajectory."""
    logs = [old - beh for old, beh in zip(sample.old, sample.behaviour, strict=True)]
    if a.veto_ratio is not None and min(logs) < math.log(a.veto_ratio):
        return True
    if a.mean_ratio_band is not None and not a.mean_ratio_band[0] <= math.exp(mean(logs)) <= a.mean_ratio_band[1]:
        return True
    product = math.exp(sum(logs))
    if a.product_ratio_band is not None and not a.product_ratio_band[0] <= product <= a.product_ratio_band[1]:
        return True
    if a.max_sequence_k3 is not None and mean([math.exp(x) - 1 - x for x in logs]) > a.max_sequence_k3:
        return True
    if a.negative_drift is not None and sample.advantages[0] < 0:
        drift = mean([b - float(lp.detach()) for lp, b in zip(sample.logprobs, sample.behaviour, strict=True)])
        return drift > a.negative_drift
    return False


def share(a: AlgorithmConfig, length: int, tokens: int, seqs: int, limit: int) -> float:
    """Weight of a token in the loss."""
    return {
        "token_mean": 1 / tokens,
        "sequence_mean": 1 / (seqs * length),
        "sequence_sum": 1 / seqs,
        "sum_of_means": 1 / length,
        "fixed_length": 1 / (seqs * limit),
    }[a.aggregation]


def divergence(a: AlgorithmConfig, lp: Tensor, ref: float, behaviour: float) -> Tensor:
    x = lp - ref
    estimate = {"k1": x, "k2": x * x / 2, "k3": torch.exp(-x) - 1 + x}[a.kl_estimator]
    return estimate * torch.exp(lp - behaviour) if a.kl_corrected else estimate


class Outcome(NamedTuple):
    loss: Tensor
    masked: int
    rejected: int
    tokens: int


def minibatch_loss(
    a: AlgorithmConfig, samples: Sequence[Sample], *, eta: int, limit: int, centred: Sequence[float]
) -> Outcome:
    """Args:
    eta: staleness bound. limit: response tokens at most. centred: VIMPO's targets.
    """
    tokens = sum(len(s.logprobs) for s in samples)
    loss = torch.zeros((), dtype=torch.float64)
    masked = rejected = 0
    searched = searched_bounds(a, samples) if a.bounds == "balanced" else None
    correct = sum(len(s.logprobs) for s in samples if s.reward > a.nll_above)
    for sample, target in zip(samples, centred, strict=True):
        whole = all(sample.fixed)
        if a.loss == "optimal_value":
            if whole:
                drift = sum(lp - ref for lp, ref in zip(sample.logprobs, sample.ref, strict=True))
                loss = loss + (a.regression_beta * drift - sample.advantages[0]) ** 2 / len(samples)
            else:
                rejected += len(sample.logprobs)
            continue
        if a.loss == "implicit_value" and whole:
            terms = sum(lp - ref - kl for lp, ref, kl in zip(sample.logprobs, sample.ref, sample.kl, strict=True))
            loss = loss + 0.5 * (a.implicit_beta * terms - target) ** 2 / len(samples)
        scale = a.actor_coefficient if a.loss == "implicit_value" else 1.0
        ratios, weights = log_ratios(a, sample), corrections(a, sample)
        out = is_rejected(a, sample)
        for index, lp in enumerate(sample.logprobs):
            own = share(a, len(sample.logprobs), tokens, len(samples), limit)
            if a.kl_coefficient and a.kl_in == "loss":
                penalty = divergence(a, lp, sample.ref[index], sample.behaviour[index])
                loss = loss + a.kl_coefficient * own * penalty
            if a.nll_coefficient and sample.reward > a.nll_above:
                loss = loss - a.nll_coefficient * lp / correct
            if out or not sample.fixed[index] or weights[index] == 0:
                rejected += 1
                continue
            advantage = sample.advantages[index]
            value, active = surrogate(a, ratios[index], lp, advantage, searched or bounds(a, sample, index, eta))
            loss = loss - scale * own * weights[index] * advantage * value
            masked += not active
    return Outcome(loss, masked, rejected, tokens)
