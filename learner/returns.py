"""Advantages and value targets from a value function: GAE, V-trace, and what goes into them.

All recursions run over the sampled tokens alone: an observation between two turns is not a step, so the last token of a
turn is followed by the first token of the next. values[t], rewards[t] and loss_mask[t] belong to the same token t, and
values[t] is the value of the state *before* it was sampled.

The recursions are plain loops over Python floats (float64): 100 000 tokens take some 50 ms, and a trajectory of any
length costs no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learner.importance import finite_log_ratio, widen
from learner.objectives import kl_estimates
from learner.segments import num_segments


def gae(
    values: Tensor,
    rewards: Tensor,
    seq_ids: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lam: Tensor | float,
    bootstrap: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation over sampled tokens.

    delta_t = r_t + gamma V_next - V_t;  A_t = delta_t + gamma lam A_next;  `next`: the trajectory's next sampled token.
    Source: arXiv 1506.02438; skipping observations: SAO, 2607.07508, equations 4 and 5.

    Args:
        values: [N], reward units; constant.
        rewards: [N], reward units; given at the token that earned them (`rewards_at_last_token`).
        seq_ids: [N] int64; tokens of a trajectory in order of time.
        loss_mask: [N] bool; tokens outside are not read.
        lam: in [0, 1]; a number, or one for each trajectory ([S], see `length_adaptive_lambda`).
        bootstrap: [S], value of the state after the last sampled token where a length limit cut the trajectory, 0 where
            it truly ended. None: all end (a cut one is then treated as a true end).

    Returns:
        [N]; 0 outside loss_mask.
    """
    positions = loss_mask.nonzero().squeeze(1)
    value, reward = _numbers(values, positions), _numbers(rewards, positions)
    seqs = seq_ids[positions].tolist()
    count = num_segments(seq_ids)
    lams = lam.double().tolist() if isinstance(lam, Tensor) else [lam] * count
    next_value = [0.0] * count if bootstrap is None else bootstrap.detach().double().tolist()
    next_advantage = [0.0] * count
    for t in range(len(seqs) - 1, -1, -1):
        seq = seqs[t]
        delta = reward[t] + gamma * next_value[seq] - value[t]
        next_advantage[seq] = delta + gamma * lams[seq] * next_advantage[seq]
        next_value[seq] = value[t]
        reward[t] = next_advantage[seq]
    return _place(reward, positions, values)


def advantages_and_returns(
    values: Tensor,
    rewards: Tensor,
    seq_ids: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lam_policy: Tensor | float,
    lam_value: Tensor | float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages of the policy with lam_policy, value targets V + A with lam_value), both [N], as `gae`.

    lam_value = 1 regresses on the Monte-Carlo return whatever the policy's lambda is. Source: VC-PPO, arXiv 2503.01491.
    """

    def estimate(lam: Tensor | float) -> Tensor:
        return gae(values, rewards, seq_ids, loss_mask, gamma=gamma, lam=lam, bootstrap=bootstrap)

    return estimate(lam_policy), torch.where(loss_mask, estimate(lam_value) + widen(values.detach()), 0.0)


def vtrace(
    values: Tensor,
    rewards: Tensor,
    log_ratios: Tensor,
    seq_ids: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    max_ratio: float = 1.0,
    max_ratio_policy: float = 1.0,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace: off-policy corrected (advantages of the policy, value targets v), both [N], 0 outside loss_mask.

    delta_t = min(max_ratio, w_t) (r_t + gamma V_next - V_t);  v_t = V_t + delta_t + gamma c_t (v_next - V_next)
    A_t = min(max_ratio_policy, w_t) (r_t + gamma (lam v_next + (1 - lam) V_next) - V_t),  c_t = lam min(1, w_t)

    max_ratio moves the fixed point (bias), c only the speed. With w = 1 it is GAE. The product of c fades over long
    trajectories, so the correction is short-ranged. Source: IMPALA, arXiv 1802.01561.

    Args:
        values, rewards, seq_ids, loss_mask, bootstrap: as in `gae`.
        log_ratios: [N], current against behaviour policy. A token whose ratio is not finite counts with w = 0.
    """
    positions = loss_mask.nonzero().squeeze(1)
    value, reward = _numbers(values, positions), _numbers(rewards, positions)
    safe, finite = finite_log_ratio(log_ratios.detach())
    ratio = _numbers(torch.where(finite, safe.double().exp(), 0.0), positions)
    seqs = seq_ids[positions].tolist()
    next_value = [0.0] * num_segments(seq_ids) if bootstrap is None else bootstrap.detach().double().tolist()
    next_error = [0.0] * num_segments(seq_ids)  # v - V of the next token
    targets = [0.0] * len(seqs)
    for t in range(len(seqs) - 1, -1, -1):
        seq, w = seqs[t], ratio[t]
        carried = lam * next_error[seq]
        step = reward[t] + gamma * next_value[seq] - value[t]
        error = min(max_ratio, w) * step + gamma * min(1.0, w) * carried
        reward[t] = min(max_ratio_policy, w) * (step + gamma * carried)  # the advantage takes the reward's place
        targets[t] = value[t] + error
        next_value[seq], next_error[seq] = value[t], error
    return _place(reward, positions, values), _place(targets, positions, values)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha * length), clipped to [0, 1]; [S] float64.

    The first token then sees about exp(-1 / alpha) of the terminal error at any length. alpha: SAO 1.5, VAPO 0.05.
    Source: VAPO, arXiv 2504.05118; SAO, 2607.07508.

    Args:
        lengths: [S], sampled tokens of each trajectory (`segment_count`): the steps of the recursion.
    """
    return (1.0 - 1.0 / (alpha * lengths.double().clamp(min=1.0))).clamp(0.0, 1.0)


def rewards_at_last_token(rewards: Tensor, seq_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """[N]: each trajectory's reward ([S]) at its last *sampled* token, 0 elsewhere.

    A trajectory without a sampled token, or with a reward that is not finite, gives nothing. The latter must not be
    learned from as a reward of 0: take its tokens out of the mask (`scorable_tokens`).
    """
    last = torch.full((num_segments(seq_ids),), -1, dtype=torch.int64, device=seq_ids.device)
    positions = loss_mask.nonzero().squeeze(1)
    last = last.scatter_reduce(0, seq_ids[positions], positions, "amax")
    given = (last >= 0) & torch.isfinite(rewards)
    spread = torch.zeros(seq_ids.shape, dtype=widen(rewards).dtype, device=rewards.device)
    spread[last[given]] = widen(rewards)[given]
    return spread


def kl_shaped_rewards(
    token_rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, coefficient: float
) -> Tensor:
    """[N]: token_rewards - coefficient * k1 on sampled tokens, 0 elsewhere; constant (KL in the reward, RLHF's way)."""
    penalty = coefficient * kl_estimates(logprobs.detach(), ref_logprobs, "k1")
    return torch.where(loss_mask, token_rewards - penalty, 0.0)


def scorable_tokens(rewards: Tensor, seq_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """[N] bool: loss_mask without the trajectories whose reward ([S]) is not finite."""
    return loss_mask & torch.isfinite(rewards)[seq_ids]


def _numbers(values: Tensor, positions: Tensor) -> list[float]:
    numbers: list[float] = values.detach()[positions].double().tolist()
    return numbers


def _place(numbers: list[float], positions: Tensor, like: Tensor) -> Tensor:
    """[N]: the numbers at their positions, 0 elsewhere; dtype and device of `like`, at least float32."""
    out = torch.zeros_like(widen(like.detach()))
    out[positions] = torch.tensor(numbers, dtype=out.dtype, device=out.device)
    return out
