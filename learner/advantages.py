"""Advantages from rewards alone: against a group, a batch, or a remembered baseline. With a learned value: returns.py.

Rewards are [S], one for each trajectory; NaN (or any non-finite number) says that the trajectory is unscorable. Such a
member takes no part in any baseline and gets advantage 0; its siblings are treated as if it had not existed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from learner.importance import widen
from learner.segments import segment_count, segment_mean, segment_sum

RELATIVE_NOISE = 1e-6  # about 8 float32 roundings: rewards closer than this, relative to their size, are equal
STD_FLOOR = 1e-6  # added to a group's standard deviation; reward units

Scale = Literal["none", "std", "population_std"]


def rewards_tensor(rewards: Sequence[float | None]) -> Tensor:
    """[S] float64; None becomes NaN (unscorable)."""
    return torch.tensor([float("nan") if reward is None else reward for reward in rewards], dtype=torch.float64)


class GroupAdvantages(NamedTuple):
    """What a group baseline says about each trajectory."""

    advantages: Tensor  # [S], reward units, or standard deviations if scaled; finite
    informative: Tensor  # [S] bool; False: unscorable, alone in its group, or its group's rewards do not differ


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, scale: Scale, leave_one_out: bool = False
) -> GroupAdvantages:
    """A_i = (R_i - mean of its group) / (standard deviation of its group + 1e-6).

    scale "std" (Bessel, n - 1): GRPO, arXiv 2402.03300; "population_std" (n); "none": Dr.GRPO, 2503.20783.
    leave_one_out: the baseline is the mean of the *others*, A_i = n / (n - 1) (R_i - mean): RLOO, 2402.14740.

    n counts the scorable members. Groups whose rewards differ by less than 1e-6 of their size are equal up to rounding:
    their advantages are exactly 0, where dividing noise by its own deviation would give values of order 1.

    Args:
        rewards: [S]; not finite: unscorable.
        group_ids: [S] int64, any labels.
    """
    _, groups = torch.unique(group_ids, return_inverse=True)
    scorable = torch.isfinite(rewards)
    clean = torch.where(scorable, rewards.double(), 0.0)
    count = segment_count(groups, scorable)
    centred = torch.where(scorable, clean - segment_mean(clean, groups, scorable)[groups], 0.0)
    informative = scorable & _differ(clean, scorable, groups)[groups]
    if leave_one_out:
        centred = centred * (count / (count - 1).clamp(min=1))[groups]
    if scale != "none":
        freedom = count - 1 if scale == "std" else count
        variance = segment_sum(centred.square(), groups) / freedom.clamp(min=1)
        centred = centred / (variance.sqrt() + STD_FLOOR)[groups]
    return GroupAdvantages(torch.where(informative, centred, 0.0).to(widen(rewards).dtype), informative)


def _differ(rewards: Tensor, scorable: Tensor, groups: Tensor) -> Tensor:
    """[number of groups] bool: the spread of the scorable rewards is more than rounding; False for fewer than two."""
    size = rewards.new_zeros(int(groups.max()) + 1 if groups.numel() else 0)
    lowest = size.scatter_reduce(0, groups, torch.where(scorable, rewards, torch.inf), "amin", include_self=False)
    highest = size.scatter_reduce(0, groups, torch.where(scorable, rewards, -torch.inf), "amax", include_self=False)
    return highest - lowest > RELATIVE_NOISE * torch.maximum(lowest.abs(), highest.abs())


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of `values` inside `mask`; adds up over micro-batches and ranks."""
    clean = torch.where(mask, values.detach().double(), 0.0)
    return torch.stack((mask.sum().double(), clean.sum(), clean.square().sum()))


def mean_and_variance(batch_moments: Tensor, *, bessel: bool) -> tuple[Tensor, Tensor]:
    """Scalars; variance 0 for values that differ only by rounding of their size, and for fewer than two."""
    count, total, squares = batch_moments.unbind()
    safe_count = count.clamp(min=1)
    mean = total / safe_count
    population = squares / safe_count - mean.square()
    population = torch.where(population > RELATIVE_NOISE**2 * squares / safe_count, population, 0.0)
    return mean, population * safe_count / (count - 1).clamp(min=1) if bessel else population


def whiten(values: Tensor, mask: Tensor, *, bessel: bool, batch_moments: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the entries inside `mask`: every token counts once, padding never.

    Args:
        values: [N].
        mask: [N] bool.
        bessel: divide the squares by n - 1 (verl, REINFORCE++) instead of n.
        batch_moments: [3], `moments` summed over the global batch. None: this tensor is the whole batch.

    Returns:
        [N]; 0 outside mask, and everywhere if the entries do not differ.
    """
    mean, variance = mean_and_variance(moments(values, mask) if batch_moments is None else batch_moments, bessel=bessel)
    whitened = (torch.where(mask, values.double(), mean) - mean) / (variance + 1e-8).sqrt()
    return torch.where(variance > 0, whitened, 0.0).to(widen(values).dtype)


def explained_variance(residual_moments: Tensor, return_moments: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R), scalar; NaN ("no data") where the returns do not differ.

    Args:
        residual_moments, return_moments: [3], `moments` of returns - values and of returns over the same tokens.
    """
    _, residual = mean_and_variance(residual_moments, bessel=False)
    _, total = mean_and_variance(return_moments, bessel=False)
    return torch.where(total > 0, 1.0 - residual / total, torch.nan)


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft penalty: 0 up to max_length - buffer, then in a line to -1 at max_length and beyond.

    Source: arXiv 2503.14476.

    Args:
        lengths: [S], sampled tokens of each trajectory; max_length, buffer: tokens.

    Returns:
        [S] float64, reward units; to be added to the reward.
    """
    over = lengths.double() - (max_length - buffer)
    return -(over / buffer).clamp(0.0, 1.0)


def smoothed_advantages(new: Tensor, total: Tensor, visit: int) -> Tensor:
    """DCPO: blends the standardised advantages of this step with those over all rewards the prompt has had so far.

    S_new = ((i - 1) new + total) / i,  S_total = (new + (i - 1) total) / i;  of the two, each member's smaller one.
    A step of equal rewards (new = 0) then still teaches total / i. Source: DCPO, arXiv 2509.02333.

    Args:
        new, total: [S], the same members standardised both ways.
        visit: i, how often this prompt has been sampled, this step included; >= 1.
    """
    by_new = ((visit - 1) * new + total) / visit
    by_total = (new + (visit - 1) * total) / visit
    return torch.where(by_new.abs() <= by_total.abs(), by_new, by_total)


def optimal_baseline(weights: Tensor, squared_norms: Tensor, rewards: Tensor) -> Tensor:
    """VCPO: the constant baseline of least gradient variance, sum w^2 g^2 R / sum w^2 g^2; scalar.

    Source: arXiv 2602.17616.

    Args:
        weights: [S], importance ratios of the sequences.
        squared_norms: [S], squared norm of each trajectory's score gradient.
        rewards: [S]; unscorable ones are left out. Without any weight the result is 0.
    """
    scorable = torch.isfinite(rewards)
    share = torch.where(scorable, weights.double().square() * squared_norms.double(), 0.0)
    total = share.sum()
    return torch.where(total > 0, (share * torch.where(scorable, rewards.double(), 0.0)).sum() / total, 0.0)


def off_policy_lr_scale(effective_samples: Tensor, num_samples: int, *, base: float = 1.0) -> Tensor:
    """VCPO: factor min(1, (ESS / S) / base)^(1/2) on this update's learning rate; scalar. Source: arXiv 2602.17616."""
    return (effective_samples / max(num_samples, 1) / base).clamp(max=1.0).sqrt()


def hybrid_advantage(rewards: Tensor, value: Tensor, next_value: Tensor, *, gamma: float) -> Tensor:
    """mean of several rewards of one state + gamma V(s') - V(s); scalar. Hybrid GRPO, arXiv 2502.01652.

    Unconfirmed: the paper's body could not be read, the formula follows its abstract. Rewards may be squashed first,
    tanh of their population z-scores.
    """
    return rewards.mean() + gamma * next_value - value


class SuccessRate(NamedTuple):
    """SPO's memory of one prompt, or of many ([P]): a Beta distribution over its chance of success.

    Source: SPO, arXiv 2509.13232. Rewards are 0 or 1 (or between).
    """

    alpha: Tensor
    beta: Tensor

    @property
    def value(self) -> Tensor:
        """Baseline of the prompt's next reward; take it *before* `updated`."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def sampling_weight(self) -> Tensor:
        """How much the prompt has to teach: sqrt(v (1 - v)) + 0.05."""
        return (self.value * (1.0 - self.value)).sqrt() + 0.05

    @classmethod
    def from_trials(cls, successes: Tensor, trials: int, *, forget_most: float = 0.875) -> SuccessRate:
        """From offline samples, weighted as 1 / (1 - forget_most) observations, the memory's length at its shortest."""
        size = 1.0 / (1.0 - forget_most)
        return cls(size * (successes + 0.5) / (trials + 1), size * (trials - successes + 0.5) / (trials + 1))

    def updated(
        self,
        reward: Tensor,
        drift: Tensor,
        *,
        half_drift: float = 0.06,
        forget_most: float = 0.875,
        keep_most: float = 0.96,
    ) -> SuccessRate:
        """After one more reward: the past is scaled by 2^(-drift / half_drift), clipped to [forget_most, keep_most].

        Args:
            drift: nats; mean |change of log-prob| of the prompt's previous response since it was sampled.
        """
        rho = torch.exp2(-drift / half_drift).clamp(forget_most, keep_most)
        return SuccessRate(rho * self.alpha + reward, rho * self.beta + (1.0 - reward))
