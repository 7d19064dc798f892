"""Off-policy corrections: weights that multiply a policy loss, and masks that reject tokens from it.

All are constants of the loss ([N], detached). A rejected token leaves the numerator only. `policy_loss` takes weights
as `correction` (0 rejects) and masks as `keep`. Bands at sequence level need no function of their own: take the log
ratio to "sequence" or "sequence_product" with `at_level`, then `band.contains(..., closed=True)` is the mask and
`truncated_weights` the truncated product.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.importance import Band, finite_log_ratio, log_ratio, widen
from learner.segments import num_segments, segment_mean


def fresh_tokens(weight_versions: Tensor, current_version: int, bound: int) -> Tensor:
    """[N] bool: staleness, the learner's version minus the token's, is at most `bound`.

    Args:
        weight_versions: [N] integers, version of the weights that sampled each token (-1 off the loss mask: not fresh).
        current_version: the learner's version at the moment of training.
        bound: weight versions, >= 0.
    """
    return current_version - weight_versions <= bound


def truncated_weights(log_ratios: Tensor, *, cap: float, floor: float = 0.0) -> Tensor:
    """clamp(rho, floor, cap), as ratios; 0 where the log ratio is not finite.

    TIS with a cap, usually of 2. With cap = inf the weight of decoupled PPO, beside a clip of the *proximal* ratio
    (AReaL, arXiv 2505.24298).
    """
    safe, finite = finite_log_ratio(log_ratios.detach())
    return torch.where(finite, safe.exp().clamp(floor, cap), 0.0)


def banded_weights(log_ratios: Tensor, band: Band) -> Tensor:
    """IcePop: rho inside the closed band, 0 outside. Usual bands: 0.5 to 5, GLM-5's 0.5 to 2."""
    safe, finite = finite_log_ratio(log_ratios.detach())
    return torch.where(finite & band.contains(log_ratios, closed=True), safe.exp(), 0.0)


def low_k3_sequences(log_ratios: Tensor, seq_ids: Tensor, loss_mask: Tensor, max_k3: float) -> Tensor:
    """[N] bool: the mean of rho - 1 - log rho over the token's sequence is at most `max_k3` nats (0.001 to 0.01)."""
    safe, finite = finite_log_ratio(log_ratios.detach())
    k3 = torch.where(finite, torch.expm1(safe) - safe, math.inf)  # inf: rejects the sequence
    return (segment_mean(k3, seq_ids, loss_mask) <= max_k3)[seq_ids]


def veto_free_sequences(log_ratios: Tensor, seq_ids: Tensor, loss_mask: Tensor, min_ratio: float = 1e-4) -> Tensor:
    """[N] bool: no token of the sequence has a ratio below `min_ratio`, or one that is not a number."""
    x = torch.where(loss_mask, log_ratios.detach(), math.inf).nan_to_num(
        nan=-math.inf, posinf=math.inf, neginf=-math.inf
    )
    lowest = x.new_full((num_segments(seq_ids),), math.inf).scatter_reduce(0, seq_ids, x, "amin")
    return (lowest >= math.log(min_ratio))[seq_ids]


def on_policy_or_positive(
    logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    seq_ids: Tensor,
    loss_mask: Tensor,
    delta: float = 1e-4,
) -> Tensor:
    """OPSM: False where A < 0 and the sequence's mean of (anchor - current) log-probs exceeds `delta` nats.

    A sequence that has become unlikely teaches nothing by being made less likely still. The anchor is the proximal
    policy (slime) or, so that the engine's mismatch counts too, the behaviour policy (TRL). Source: DeepSeek-V3.2.
    """
    drift = segment_mean(-log_ratio(logprobs.detach(), anchor_logprobs), seq_ids, loss_mask)[seq_ids]
    return (drift <= delta) | ~(advantages < 0)


def second_moment_mask(log_ratios: Tensor, loss_mask: Tensor, tau: float = 0.04) -> Tensor:
    """M2PO: drops the tokens of largest (log ratio)^2 until the mean over the rest is below `tau`; keeps at least one.

    The mean is over everything it is given: hand it the whole batch, not a micro-batch. Source: arXiv 2510.01161.

    Returns:
        [N] bool; False outside loss_mask and where the log ratio is not finite.
    """
    eligible = loss_mask & torch.isfinite(log_ratios.detach())
    squares = torch.where(eligible, log_ratios.detach().double().square(), math.inf)
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = means < tau  # the mean of an ascending prefix never falls: this is a prefix too
    kept[:1] = True
    return torch.zeros_like(kept).scatter(0, order, kept) & eligible


def probability_shift_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, delta_low: float = 0.2, delta_high: float = 0.2
) -> Tensor:
    """DPPO-TV: False where the token's probability has already moved by more than delta in the advantage's direction.

    Dropped: A > 0 and p - p_rollout > delta_high; A < 0 and p - p_rollout < -delta_low. Bounds a change of probability,
    where a ratio bound is tight on rare tokens and loose on frequent ones. Goes with `ratio` or `truncate` of w.
    Source: DPPO, arXiv 2602.04879.
    """
    shift = widen(logprobs.detach()).exp() - widen(rollout_logprobs).exp()
    moved = ((advantages > 0) & (shift > delta_high)) | ((advantages < 0) & (shift < -delta_low))
    return ~moved & torch.isfinite(shift)


def interpolated_proximal(
    logprobs: Tensor, rollout_logprobs: Tensor, weight_versions: Tensor, current_version: int, *, linear: bool = False
) -> Tensor:
    """A-3PO: the proximal log-probs without a forward pass, between behaviour and current policy by version.

    alpha = (current - 1 - v) / (current - v), in [0, 1]; 0 for a token of the current version.
    Result: rollout + alpha (sg(current) - rollout) in log space, or with `linear` in probability.
    Source: arXiv 2512.06547.

    Args:
        logprobs, rollout_logprobs: [N], nats.
        weight_versions: [N] integers; tokens with -1 (not sampled) get their rollout log-prob back.
        current_version: the learner's version.

    Returns:
        [N], nats; constant.
    """
    rollout = widen(rollout_logprobs.detach())
    current = widen(logprobs.detach())
    staleness = (current_version - weight_versions).to(rollout.dtype)
    sampled = (weight_versions >= 0) & (staleness > 0)
    alpha = torch.where(sampled, ((staleness - 1) / staleness.clamp(min=1)).clamp(0.0, 1.0), 0.0)
    if linear:
        return (rollout.exp() + alpha * (current.exp() - rollout.exp())).log()
    return torch.where(alpha > 0, rollout + alpha * (current - rollout), rollout)


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, scalar in [1, S]; 0 without weights. weights: [S] >= 0, unclipped ratios of sequences."""
    total, squares = weights.double().sum(), weights.double().square().sum()
    return torch.where(squares > 0, total.square() / squares, 0.0)
