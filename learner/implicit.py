"""Objectives that take the value from the policy itself (VIMPO), or from a table made beforehand (A*-PO).

Both are regressions of a log ratio summed over whole trajectories: a trajectory must not be cut across calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.importance import log_ratio
from learner.objectives import Metrics
from learner.segments import segment_count, segment_sum


def implicit_rewards(logprobs: Tensor, ref_logprobs: Tensor, full_kl: Tensor, beta: float) -> Tensor:
    """VIMPO's term of each token: beta (logprob - ref_logprob - sg(KL)), [N].

    Under a KL penalty the optimal policy's log ratio is the optimality gap of the value, so these terms add up to
    r - V*(s0). Detached, they are also the rewards of the actor: `gae` with values 0. Source: VIMPO, arXiv 2606.20008.

    Args:
        logprobs: [N], nats; carries the gradient.
        ref_logprobs: [N], nats; constant.
        full_kl: [N], nats; exact KL(pi || ref) over the vocabulary at each token; constant (a sampled k1 would cancel).
    """
    return beta * (log_ratio(logprobs, ref_logprobs) - full_kl.detach())


def implicit_value_loss(
    terms: Tensor, centred_rewards: Tensor, seq_ids: Tensor, loss_mask: Tensor, *, num_seqs: float
) -> tuple[Tensor, Metrics]:
    """VIMPO's L_V = 1 / (2 num_seqs) * sum over trajectories of (sum_t term_t - centred reward)^2.

    Args:
        terms: [N] from `implicit_rewards`; carries the gradient.
        centred_rewards: [S], reward minus its group's mean; constant.
        seq_ids: [N] int64.
        loss_mask: [N] bool; a trajectory without a token counts nothing.
        num_seqs: trajectories with a token over the whole global batch.
    """
    return _regression(terms, centred_rewards, seq_ids, loss_mask, scale=0.5 / max(num_seqs, 1.0))


def optimal_value(rewards: Tensor, beta: float) -> Tensor:
    """A*-PO's offline estimate V*(x) = beta log mean exp(r / beta), scalar, between the mean and the largest reward.

    Args:
        rewards: [n], of n samples of the reference policy for one prompt; not finite: left out. NaN if none is left.
        beta: reward units, > 0; the smaller, the nearer to the best sample. Paper: 0.5, n = 8.
    """
    rewards = rewards[torch.isfinite(rewards)].double()
    if not len(rewards):
        return rewards.new_full((), math.nan)
    return beta * (torch.logsumexp(rewards / beta, 0) - math.log(len(rewards)))


def a_star_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    optimal_values: Tensor,
    seq_ids: Tensor,
    loss_mask: Tensor,
    *,
    beta: float,
    num_seqs: float,
) -> tuple[Tensor, Metrics]:
    """A*-PO: 1 / num_seqs * sum over trajectories of (beta sum_t (logprob - ref_logprob) - (r - V*))^2.

    Strictly on-policy: stale samples are regressed on unweighted. Source: arXiv 2505.20686.

    Args:
        logprobs: [N], nats; carries the gradient.
        ref_logprobs: [N], nats; constant.
        rewards, optimal_values: [S]; a trajectory where either is not finite is left out.
        seq_ids: [N] int64; loss_mask: [N] bool, end token included.
        beta: reward units a nat; paper 1e-3.
        num_seqs: trajectories with a token over the whole global batch.
    """
    terms = beta * log_ratio(logprobs, ref_logprobs)
    return _regression(terms, rewards - optimal_values, seq_ids, loss_mask, scale=1.0 / max(num_seqs, 1.0))


def _regression(
    terms: Tensor, targets: Tensor, seq_ids: Tensor, loss_mask: Tensor, *, scale: float
) -> tuple[Tensor, Metrics]:
    sums = segment_sum(terms, seq_ids, loss_mask)
    used = (segment_count(seq_ids, loss_mask) > 0) & torch.isfinite(targets) & torch.isfinite(sums.detach())
    residuals = torch.where(used, sums, 0.0) - torch.where(used, targets.detach(), 0.0)
    squares = residuals.square()
    return scale * squares.sum(), {"implicit/squared_error_sum": squares.detach().sum(), "implicit/seqs": used.sum()}
