"""Trust-region bounds that are not one constant: by the token's probability, its staleness, or the batch's balance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.importance import Band, finite_log_ratio, widen


def probability_band(
    proximal_logprobs: Tensor, *, eps_low: float = 0.16, eps_high: float = 0.2, max_ratio: float = 10.0
) -> Band:
    """DCPO: rare tokens may change by more. The interval solves |(r - 1) p| <= eps with p = r q, q the old probability.

    low = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q, 0)),  high = 1/2 + 1/2 sqrt(1 + 4 eps_high / q),  at most max_ratio.
    Source: DCPO, arXiv 2509.02333.

    Args:
        proximal_logprobs: [N], nats.

    Returns:
        Band with [N] ends.
    """
    q = widen(proximal_logprobs.detach()).exp()
    low = 0.5 + 0.5 * (1.0 - 4.0 * eps_low / q).clamp(min=0.0).sqrt()
    high = 0.5 + 0.5 * (1.0 + 4.0 * eps_high / q).sqrt()
    return Band.from_ratios(low.clamp(max=max_ratio), high.clamp(max=max_ratio))


def linear_offsets(staleness: Tensor, *, fresh: float, stale: float, bound: int) -> Tensor:
    """An offset that goes in a line from `fresh` at staleness 0 to `stale` at staleness `bound`, and stays there.

    Args:
        staleness: [N], weight versions.
        bound: weight versions; 0: `fresh` at 0, `stale` beyond.

    Returns:
        [N] float32.
    """
    share = (staleness.float() / max(bound, 1)).clamp(0.0, 1.0)
    return fresh + (stale - fresh) * share


def table_offsets(staleness: Tensor, table: Sequence[float]) -> Tensor:
    """[N] float32: table[staleness]; the last entry serves everything staler."""
    entries = torch.tensor(table, dtype=torch.float32, device=staleness.device)
    return entries[staleness.long().clamp(0, len(table) - 1)]


def gradient_contributions(
    log_ratios: Tensor, advantages: Tensor, loss_mask: Tensor, lows: Sequence[float], highs: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """How much positive and negative gradient PPO's clip would let through at each candidate bound.

    positive[j]: sum of A r over tokens with A > 0, r <= highs[j];  negative[i]: sum of -A r over A < 0, r >= lows[i].
    Only tokens that still carry gradient count. Counting clipped surrogate *values*, as one public recipe does, makes
    the negative share grow with the lower bound, so that the search for balance runs away from it.

    Args:
        log_ratios, advantages: [N]; constant.
        loss_mask: [N] bool.
        lows, highs: ratios.

    Returns:
        ([len(highs)], [len(lows)]) float64; they add up over micro-batches and ranks.
    """
    safe, finite = finite_log_ratio(log_ratios.detach())
    used = loss_mask & finite
    ratios = safe.double().exp()
    gain = torch.where(used & (advantages > 0), advantages.detach().double() * ratios, 0.0)
    loss = torch.where(used & (advantages < 0), -advantages.detach().double() * ratios, 0.0)
    positive = torch.stack([torch.where(ratios <= high, gain, 0.0).sum() for high in highs])
    negative = torch.stack([torch.where(ratios >= low, loss, 0.0).sum() for low in lows])
    return positive, negative


def balanced_band(
    positive: Tensor, negative: Tensor, lows: Sequence[float], highs: Sequence[float], target: float
) -> tuple[float, float]:
    """BAPO: the first (low, high), as ratios, at which positive / negative reaches `target`; else the last pair.

    Raises the lower bound first, then the upper one. Source: BAPO, arXiv 2510.18927.

    Args:
        positive, negative: from `gradient_contributions`, summed over the global batch, so that all ranks agree.
        lows, highs: the candidates, rising; the first pair is where the search starts.
        target: wanted ratio of positive to negative gradient.
    """
    gains, losses = positive.tolist(), negative.tolist()
    steps = [(i, 0) for i in range(len(lows))] + [(len(lows) - 1, j) for j in range(1, len(highs))]
    for i, j in steps:
        if gains[j] >= target * losses[i]:
            return lows[i], highs[j]
    return lows[-1], highs[-1]
