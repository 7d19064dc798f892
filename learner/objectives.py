"""Losses put together from the parts in `importance.py` and `corrections.py`, and their aggregation.

Every loss is a sum over tokens (or sequences) of weight * token loss, with weights from `token_weights` that already
hold the denominator of the whole global batch. So the sum over micro-batches and ranks *is* the loss, however the batch
was cut; metrics are sums for the same reason, and ratios of them are formed where they are shown.

A token that a trust region, a correction or the staleness bound rejects leaves the numerator only: its weight has been
counted in the denominator already.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.importance import Surrogate, log_ratio, widen
from learner.segments import segment_count

Metrics = dict[str, Tensor]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sum_of_means", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]

MAX_KL_LOG_RATIO = 20.0
MAX_KL = 10.0


def token_weights(
    loss_mask: Tensor,
    seq_ids: Tensor,
    aggregation: Aggregation,
    *,
    num_tokens: float,
    num_seqs: float,
    max_length: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Share of each token in the loss.

    token_mean:     1 / num_tokens                        DAPO, VAPO, CISPO, DIS
    sequence_mean:  1 / (num_seqs * tokens of its sequence)   GRPO, GSPO, SAPO
    sum_of_means:   1 / tokens of its sequence            DCPO
    sequence_sum:   1 / num_seqs                          leave-one-out; LUSPO where the ratio is the sequence's
    fixed_length:   1 / (num_seqs * max_length)           Dr.GRPO; with num_seqs = 1 verl's seq-mean-token-sum-norm

    Args:
        loss_mask: [N] bool; tokens to be trained, *before* any rejection.
        seq_ids: [N] int64. A sequence is never cut: its length is counted here.
        num_tokens: True entries of loss_mask over the whole global batch, all micro-batches and ranks.
        num_seqs: trajectories with at least one such token over the whole global batch.
        max_length: tokens; for fixed_length. A constant of the run, never the width of a batch.

    Returns:
        [N]; 0 exactly outside loss_mask. Losses do not read tokens of weight 0, whatever they hold.
    """
    if aggregation == "token_mean":
        weights = torch.full_like(seq_ids, 1.0 / max(num_tokens, 1.0), dtype=torch.float64)
    elif aggregation == "sequence_mean":
        weights = 1.0 / (max(num_seqs, 1.0) * segment_count(seq_ids, loss_mask)[seq_ids])
    elif aggregation == "sum_of_means":
        weights = 1.0 / segment_count(seq_ids, loss_mask)[seq_ids]
    elif aggregation == "sequence_sum":
        weights = torch.full_like(seq_ids, 1.0 / max(num_seqs, 1.0), dtype=torch.float64)
    else:
        if max_length is None:
            raise ValueError("fixed_length needs max_length, a number of tokens")
        weights = torch.full_like(seq_ids, 1.0 / (max(num_seqs, 1.0) * max_length), dtype=torch.float64)
    return torch.where(loss_mask, weights, 0.0).to(dtype)


def policy_loss(
    surrogate: Surrogate,
    advantages: Tensor,
    weights: Tensor,
    *,
    correction: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """loss = -sum_t weight_t * keep_t * sg(correction_t * A_t) * surrogate_t.

    Args:
        surrogate: from a trust region of `importance.py`.
        advantages: [N]; constant.
        weights: [N] from `token_weights`.
        correction: [N], constant; off-policy weights (TIS, IcePop, decoupled rho). None: 1.
        keep: [N] bool; False rejects the token (staleness bound, veto, DPPO, M2PO ...). None: all are kept.

    Returns:
        Scalar loss, and metrics that sum across micro-batches and ranks: `policy/tokens` in the denominator;
        `policy/rejected_tokens` by keep or a correction of 0; `policy/masked_tokens`, the others without gradient
        because of the trust region, and of these `masked_low`, `masked_high` (log ratio below or above 0),
        `masked_positive` and `masked_negative` (sign of the advantage).
    """
    trained = weights > 0
    kept = trained if keep is None else trained & keep
    scale = advantages.detach()
    if correction is not None:
        kept = kept & (correction != 0)
        scale = scale * correction.detach()
    scale = torch.where(kept, scale * weights, 0.0)
    loss = -(scale * torch.where(kept, surrogate.value, 0.0)).sum()
    masked = kept & ~surrogate.active
    metrics = {
        "policy/tokens": trained.sum(),
        "policy/rejected_tokens": (trained & ~kept).sum(),
        "policy/masked_tokens": masked.sum(),
        "policy/masked_low_tokens": (masked & (surrogate.log_ratios < 0)).sum(),
        "policy/masked_high_tokens": (masked & (surrogate.log_ratios > 0)).sum(),
        "policy/masked_positive_tokens": (masked & (advantages > 0)).sum(),
        "policy/masked_negative_tokens": (masked & (advantages < 0)).sum(),
    }
    return loss, metrics


def kl_estimates(logprobs: Tensor, ref_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(pi || pi_ref) at each sampled token, with x = logprobs - ref_logprobs.

    k1 = x                  unbiased, may be negative; for rewards: its gradient is 0 in expectation
    k2 = x^2 / 2            biased value; in a loss exactly the gradient of KL(pi || ref)
    k3 = exp(-x) - 1 + x    unbiased, >= 0; in a loss the gradient of the *forward* KL, KL(ref || pi)

    x is clamped to +-20 and k3 to 10. A token whose x is not finite gets 0. Source: http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: [N], nats; carries the gradient.
        ref_logprobs: [N], nats; constant.

    Returns:
        [N].
    """
    x = log_ratio(logprobs, ref_logprobs)
    x = torch.where(torch.isfinite(x.detach()), x, 0.0).clamp(-MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO)
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    return (torch.expm1(-x) + x).clamp(max=MAX_KL)


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    weights: Tensor,
    estimator: KlEstimator,
    *,
    sampler_logprobs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """sum_t weight_t * KL estimate, to be multiplied by the coefficient and added to the policy loss.

    With `sampler_logprobs` each estimate is multiplied by the differentiated ratio exp(logprobs - sampler_logprobs).
    That makes the gradient of k1 and k3 exactly that of KL(pi || ref), and corrects for tokens sampled by an older
    policy; pass logprobs.detach() where the current policy sampled them.

    Args:
        logprobs: [N], nats; carries the gradient.
        ref_logprobs: [N], nats; constant.
        weights: [N] from `token_weights`.
        sampler_logprobs: [N], nats; constant; None: estimates are differentiated as they are.

    Raises:
        ValueError: k1 without sampler_logprobs, whose gradient would push in no direction.
    """
    if estimator == "k1" and sampler_logprobs is None:
        raise ValueError("a k1 loss has gradient 0 in expectation: use k2 or k3, or give sampler_logprobs")
    trained = weights > 0
    estimates = kl_estimates(logprobs, ref_logprobs, estimator)
    if sampler_logprobs is not None:
        x = log_ratio(logprobs, sampler_logprobs)
        usable = torch.isfinite(x.detach())
        importance = torch.where(usable, x, 0.0).clamp(-MAX_KL_LOG_RATIO, MAX_KL_LOG_RATIO).exp()
        estimates = torch.where(usable, importance * estimates, 0.0)
    estimates = torch.where(trained, estimates, 0.0)
    return (weights * estimates).sum(), {"kl/sum": estimates.detach().sum(), "kl/tokens": trained.sum()}


def nll_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """-sum_t weight_t * logprob_t, to be multiplied by the coefficient (VAPO: 0.1) and added.

    Imitates what went well: `weights` come from `token_weights` with the tokens of *correct* trajectories as mask and
    their count over the global batch as num_tokens. Source: VAPO, arXiv 2504.05118.

    Args:
        logprobs: [N], nats; carries the gradient. weights: [N].
    """
    trained = weights > 0
    logprobs = torch.where(trained, widen(logprobs), 0.0)
    return -(weights * logprobs).sum(), {"nll/sum": -logprobs.detach().sum(), "nll/tokens": trained.sum()}


def entropy_loss(entropies: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """-sum_t weight_t * entropy_t, to be multiplied by the coefficient and added: a positive one keeps entropy up.

    Args:
        entropies: [N], nats, of the whole next-token distribution; carries the gradient.
        weights: [N] from `token_weights`.
    """
    trained = weights > 0
    entropies = torch.where(trained, widen(entropies), 0.0)
    return -(weights * entropies).sum(), {
        "entropy/sum": entropies.detach().sum(),
        "entropy/tokens": trained.sum(),
    }


def value_loss(
    values: Tensor,
    returns: Tensor,
    weights: Tensor,
    *,
    old_values: Tensor | None = None,
    clip_range: float | None = None,
) -> tuple[Tensor, Metrics]:
    """sum_t weight_t * (V_t - R_t)^2; multiply by 0.5 for verl's convention.

    With a clip range: max((V - R)^2, (clip(V, old - range, old + range) - R)^2) in place of the square.

    Args:
        values: [N], reward units; carries the gradient. values[t] is of the state *before* token t.
        returns: [N]; constant.
        weights: [N] from `token_weights`.
        old_values: [N], before the update; constant. Goes with clip_range.
        clip_range: reward units.
    """
    if (old_values is None) != (clip_range is None):
        raise ValueError("old_values and clip_range go together")
    trained = weights > 0
    values = torch.where(trained, widen(values), 0.0)
    returns = torch.where(trained, returns.detach(), 0.0)
    errors = (values - returns).square()
    if old_values is not None and clip_range is not None:
        old = torch.where(trained, old_values.detach(), 0.0)
        clipped = torch.clamp(values, old - clip_range, old + clip_range)
        errors = torch.maximum(errors, (clipped - returns).square())
    return (weights * errors).sum(), {"value/squared_error_sum": errors.detach().sum(), "value/tokens": trained.sum()}
