"""Importance ratios and the trust regions built on them, for flat streams of tokens.

Four log-probs of one sampled token meet here, all of the distribution that was sampled from (same temperature):
`logprobs` (current policy, carries the gradient), `proximal_logprobs` (learner before the update), `rollout_logprobs`
(recorded by the engine) and `ref_logprobs` (frozen reference). Their log ratios:

    w   = logprobs - rollout_logprobs             behaviour reference: staleness and engine mismatch together
    r   = logprobs - proximal_logprobs            proximal reference: what this update changed
    rho = proximal_logprobs - rollout_logprobs    w = r + rho; what was off-policy before the update

A policy loss is put together from independent parts: the log ratio, its level (`at_level`), a trust region (a
`Surrogate`, below), off-policy corrections and rejections (`corrections.py`) and an aggregation (`objectives.py`).

Every function takes [N] tensors, computes in float32 or float64, and leaves tokens out by selection, never by
multiplication with 0: a token whose log ratio is not finite has surrogate 0 and gradient 0.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learner.segments import segment_mean, segment_sum

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any trust region, and its square is still finite in float32

Level = Literal["token", "sequence", "sequence_token", "sequence_product"]


def widen(values: Tensor) -> Tensor:
    """float64 stays, anything narrower becomes float32: exp of a bfloat16 difference is off by percents."""
    return values if values.dtype == torch.float64 else values.float()


def log_ratio(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """log(pi / pi_reference) of each token.

    Args:
        logprobs: [N], nats; carries the gradient if it has one.
        reference_logprobs: [N], nats; treated as constant.

    Returns:
        [N] float32 (float64 if the inputs are); may hold +-inf and NaN, which every user of it leaves out.
    """
    return widen(logprobs) - widen(reference_logprobs.detach())


def at_level(log_ratios: Tensor, seq_ids: Tensor, loss_mask: Tensor, level: Level) -> Tensor:
    """Token log ratios, or in their place the one of the whole sequence.

    token:            log ratio of the token
    sequence:         mean over the sequence (log of the geometric mean), gradient spread over its tokens; GSPO
    sequence_token:   same value, but each token's gradient is its own: x - sg(x) + sg(mean); GSPO-token
    sequence_product: sum over the sequence; its variance grows with the length, so a fixed band rejects long ones first

    One non-finite token makes the ratio of its whole sequence non-finite, so that the sequence is left out.
    A sequence must not be cut across calls. Source: GSPO, arXiv 2507.18071.

    Args:
        log_ratios: [N].
        seq_ids: [N] int64, trajectory of each token.
        loss_mask: [N] bool; others are not read.

    Returns:
        [N]; unspecified outside loss_mask.
    """
    if level == "token":
        return log_ratios
    if level == "sequence_product":
        return segment_sum(log_ratios, seq_ids, loss_mask)[seq_ids]
    mean = segment_mean(log_ratios, seq_ids, loss_mask)[seq_ids]
    if level == "sequence":
        return mean
    return log_ratios - log_ratios.detach() + mean.detach()


def ratio_metrics(log_ratios: Tensor, loss_mask: Tensor) -> dict[str, Tensor]:
    """How far a ratio is from 1: sums that add up over micro-batches and ranks; divide by `ratio/tokens` to show.

    Returns:
        Over the tokens of loss_mask whose log ratio x is finite: their number, and the sums of x, |x|, x^2 (the second
        moment of M2PO) and exp(x) - 1 - x (k3 of reference against current policy, nats). And how many are not finite.
    """
    finite = loss_mask & torch.isfinite(log_ratios.detach())
    x = torch.where(finite, log_ratios.detach(), 0.0).double()
    return {
        "ratio/tokens": finite.sum(),
        "ratio/nonfinite_tokens": (loss_mask & ~finite).sum(),
        "ratio/log_sum": x.sum(),
        "ratio/abs_log_sum": x.abs().sum(),
        "ratio/squared_log_sum": x.square().sum(),
        "ratio/k3_sum": (torch.expm1(x.clamp(max=MAX_LOG_RATIO)) - x).sum(),
    }


class Band(NamedTuple):
    """Interval of ratios, kept as logarithms; each end is a number or one value per token ([N]).

    Bounds are compared in log space, where float32 keeps both tails exact. Make one with `from_offsets` or
    `from_ratios`: papers write both, and 5.0 means a ratio of 6 in one and of 5 in the other.
    """

    log_low: Tensor | float
    log_high: Tensor | float

    @classmethod
    def from_offsets(cls, eps_low: Tensor | float, eps_high: Tensor | float) -> Band:
        """Ratios from 1 - eps_low to 1 + eps_high; eps_low >= 1 means no lower bound."""
        return cls(_log1p(-eps_low), _log1p(eps_high))

    @classmethod
    def from_ratios(cls, low: Tensor | float, high: Tensor | float) -> Band:
        """Ratios from low to high; 0 and inf mean no bound."""
        return cls(_log(low), _log(high))

    def contains(self, log_ratios: Tensor, *, closed: bool) -> Tensor:
        """[N] bool; with `closed` the bounds themselves are inside. NaN is outside; constant in the gradient."""
        x = log_ratios.detach()
        if closed:
            return (x >= self.log_low) & (x <= self.log_high)
        return (x > self.log_low) & (x < self.log_high)


def _log1p(x: Tensor | float) -> Tensor | float:
    if isinstance(x, Tensor):
        return torch.log1p(x.clamp(min=-1.0))
    return math.log1p(x) if x > -1.0 else -math.inf


def _log(x: Tensor | float) -> Tensor | float:
    if isinstance(x, Tensor):
        return x.log()
    return math.log(x) if x > 0.0 else -math.inf


def _where(condition: Tensor, yes: Tensor | float, no: float, like: Tensor) -> Tensor:
    """torch.where with numbers, in the dtype of `like`: on two numbers torch would fall back to float32."""
    return torch.where(condition, torch.as_tensor(yes, dtype=like.dtype, device=like.device), no)


class Surrogate(NamedTuple):
    """What a trust region leaves of a token: its loss is -advantage * value.

    `policy_loss` turns it into a loss; the region's choice is wholly in here.
    """

    value: Tensor  # [N], carries the gradient; finite everywhere
    active: Tensor  # [N] bool; True where the region lets gradient through
    log_ratios: Tensor  # [N], the ratio the region judged, for metrics; constant


def finite_log_ratio(log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    """(log ratio clamped to +-MAX_LOG_RATIO and 0 where it was not finite, [N] bool: it was finite)."""
    finite = torch.isfinite(log_ratios.detach())
    return torch.where(finite, log_ratios, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), finite


def _weighted_score(logprobs: Tensor, weights: Tensor, active: Tensor, log_ratios: Tensor) -> Surrogate:
    """sg(weight) * logprob on active tokens, 0 on the others."""
    score = torch.where(active, widen(logprobs), 0.0)
    return Surrogate(torch.where(active, weights.detach(), 0.0) * score, active, log_ratios.detach())


def score(logprobs: Tensor) -> Surrogate:
    """Plain policy gradient, no ratio: value = logprob."""
    active = torch.isfinite(logprobs.detach())
    return Surrogate(torch.where(active, widen(logprobs), 0.0), active, torch.zeros_like(widen(logprobs.detach())))


def ratio(log_ratios: Tensor) -> Surrogate:
    """No trust region: value = ratio, which carries the gradient."""
    safe, finite = finite_log_ratio(log_ratios)
    return Surrogate(torch.where(finite, safe.exp(), 0.0), finite, log_ratios.detach())


def clip(log_ratios: Tensor, advantages: Tensor, band: Band, dual_clip: float | None = None) -> Surrogate:
    """PPO: -A * value = max(-A r, -A clip(r, band)); a clipped token keeps its value and loses its gradient.

    Gradient is lost where A > 0 and r is above the band, or A < 0 and r below it. With `dual_clip` = c > 1 also where
    A < 0 and r > c. Source: PPO, arXiv 1707.06347; asymmetric bounds: DAPO, 2503.14476; dual clip: 1912.09729.

    Args:
        log_ratios: [N], carries the gradient; at any level.
        advantages: [N]; only the sign is used.
        band: from_offsets(eps_low, eps_high).
        dual_clip: largest ratio that a token of negative advantage counts with; None: no limit.
    """
    safe, finite = finite_log_ratio(log_ratios)
    floor = _where(advantages < 0, band.log_low, -math.inf, safe)
    most = _where(advantages > 0, band.log_high, math.log(dual_clip) if dual_clip else math.inf, safe)
    inside = (safe >= floor) & (safe <= most)
    return Surrogate(
        torch.where(finite, safe.clamp(floor, most).exp(), 0.0), finite & inside.detach(), log_ratios.detach()
    )


def double_sided_mask(log_ratios: Tensor, logprobs: Tensor, band: Band) -> Surrogate:
    """DIS: value = sg(w) * logprob strictly inside the band, 0 outside, whatever the advantage's sign.

    PPO clips one side per sign; here both tails drop out. The weight is constant: differentiating it would add
    (1 + logprob) and turn the gradient round wherever p < 1/e. Source: SAO, arXiv 2607.07508, equations 1 to 3.

    Args:
        log_ratios: [N]; at any level, SAO's is the token's against the behaviour policy.
        logprobs: [N], nats; carries the gradient.
        band: from_offsets(eps_low, eps_high); (0.3, 5.0) is the open band (0.7, 6.0).
    """
    safe, finite = finite_log_ratio(log_ratios)
    return _weighted_score(logprobs, safe.exp(), finite & band.contains(log_ratios, closed=False), log_ratios)


def truncate(log_ratios: Tensor, logprobs: Tensor, *, cap: Tensor | float, floor: Tensor | float = 0.0) -> Surrogate:
    """CISPO: value = sg(clamp(r, floor, cap)) * logprob; every token keeps its gradient.

    Source: CISPO, arXiv 2506.13585. `cap` and `floor` are ratios, not offsets: slime's and verl's epsilon_high of 0.28
    is a cap of 1.28, TRL's epsilon_high of 5 a cap of 5. Both are numbers, or both one value per token ([N]).

    Args:
        log_ratios: [N]; logprobs: [N], nats; carries the gradient.
    """
    safe, finite = finite_log_ratio(log_ratios)
    weights = torch.clamp(safe.exp(), floor, cap)  # type: ignore[arg-type]  # two numbers, or two tensors
    return _weighted_score(logprobs, weights, finite, log_ratios)


def soft_gate(
    log_ratios: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Surrogate:
    """SAPO: value = (4 / tau) * sigmoid(tau * (r - 1)), differentiated through r.

    The gradient's weight 4 p (1 - p) r, p = sigmoid(tau (r - 1)), is 1 at r = 1 and fades smoothly on both sides; tau
    is tau_positive where the advantage is above 0, else tau_negative. Source: SAPO, arXiv 2511.20347.
    """
    safe, finite = finite_log_ratio(log_ratios)
    tau = _where(advantages > 0, tau_positive, tau_negative, safe)
    gate = torch.sigmoid(tau * (safe.exp() - 1.0)) * 4.0 / tau
    return Surrogate(torch.where(finite, gate, 0.0), finite, log_ratios.detach())


def gamma_weight(
    log_ratios: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Surrogate:
    """VESPO: value = sg(phi(w)) * logprob, phi(w) = exp(lam) w^k exp(-lam w), which is 1 at w = 1.

    Source: VESPO, arXiv 2602.10693.

    Args:
        log_ratios: [N], level "sequence_product": w is the ratio of the whole sequence.
        logprobs: [N], nats; carries the gradient.
        advantages: [N]; only the sign is used.
        positive, negative: (k, lam) where the advantage is >= 0, and where it is below.
    """
    safe, finite = finite_log_ratio(log_ratios)
    is_negative = advantages < 0
    k = _where(is_negative, negative[0], positive[0], safe)
    lam = _where(is_negative, negative[1], positive[1], safe)
    return _weighted_score(logprobs, (lam + k * safe - lam * safe.exp()).exp(), finite, log_ratios)
