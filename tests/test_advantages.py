"""Advantages from rewards alone: limits, unscorable members, float noise, padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.advantages import (
    SuccessRate,
    explained_variance,
    group_advantages,
    mean_and_variance,
    moments,
    off_policy_lr_scale,
    optimal_baseline,
    overlong_penalty,
    rewards_tensor,
    smoothed_advantages,
    whiten,
)

ONE_GROUP = torch.zeros(4, dtype=torch.int64)
SCALES = ["none", "std", "population_std"]


def true(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_unscorable_member_leaves_the_baseline_and_gets_nothing(missing: float | None) -> None:
    """F-21."""
    rewards = rewards_tensor([1.0, missing, 0.0, 1.0])
    result = group_advantages(rewards, ONE_GROUP, scale="none")
    assert result.advantages.tolist() == pytest.approx([1 / 3, 0.0, -2 / 3, 1 / 3])
    assert result.informative.tolist() == [True, False, True, True]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_siblings_are_as_if_the_unscorable_member_had_not_existed(scale: Any, leave_one_out: bool) -> None:
    with_it = group_advantages(
        rewards_tensor([1.0, None, 0.0, 1.0]), ONE_GROUP, scale=scale, leave_one_out=leave_one_out
    )
    without = group_advantages(rewards_tensor([1.0, 0.0, 1.0]), ONE_GROUP[:3], scale=scale, leave_one_out=leave_one_out)
    assert torch.equal(with_it.advantages[[0, 2, 3]], without.advantages)


@pytest.mark.parametrize("scale", SCALES)
def test_group_without_a_scorable_member_is_skipped(scale: Any) -> None:
    result = group_advantages(rewards_tensor([None, math.nan, math.inf, -math.inf]), ONE_GROUP, scale=scale)
    assert result.advantages.tolist() == [0.0] * 4
    assert not result.informative.any()


@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64),
        torch.tensor([1.0, 1.0, 1.0, 1.0000001]),
        torch.tensor([1.0, 1.0, 1.0, 1.0000001]).double(),
        torch.tensor([1e6, 1e6 + 0.0625, 1e6, 1e6]),
        torch.tensor([-3.0, -3.0, -3.0, -3.0000002]),
        torch.tensor([0.0, 0.0, 0.0, 0.0]),
    ],
    ids=["float64 noise", "float32 noise", "float32 noise widened", "large", "negative", "zero"],
)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_rewards_equal_up_to_rounding_give_exactly_zero(rewards: Tensor, scale: Any, leave_one_out: bool) -> None:
    """F-16."""
    result = group_advantages(rewards, ONE_GROUP, scale=scale, leave_one_out=leave_one_out)
    assert result.advantages.tolist() == [0.0] * 4
    assert not result.informative.any()


def test_small_but_real_differences_are_signal() -> None:
    for rewards in ([1e-3, 0.0, 0.0, 0.0], [100.0, 100.01, 100.0, 100.0]):
        assert group_advantages(torch.tensor(rewards), ONE_GROUP, scale="std").informative.all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_group_of_one_has_advantage_zero(scale: Any, leave_one_out: bool) -> None:
    result = group_advantages(
        torch.tensor([1.0, 7.0, 0.0]), torch.tensor([4, 2, 4]), scale=scale, leave_one_out=leave_one_out
    )
    assert result.advantages[1].item() == 0.0
    assert result.informative.tolist() == [True, False, True]
    assert result.advantages[0].item() > 0.0 > result.advantages[2].item()


def test_groups_do_not_touch_each_other_and_need_no_order() -> None:
    rewards = torch.tensor([1.0, 10.0, 0.0, 30.0])
    result = group_advantages(rewards, torch.tensor([7, -3, 7, -3]), scale="none")
    assert result.advantages.tolist() == [0.5, -10.0, -0.5, 10.0]


def test_no_member_at_all_is_no_error() -> None:
    result = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), scale="std")
    assert result.advantages.shape == result.informative.shape == (0,)


@pytest.mark.parametrize("filling", [0.0, 1000.0, math.nan, math.inf])
@pytest.mark.parametrize("width", [4, 8])
def test_padding_has_no_influence_on_whitening(filling: float, width: int) -> None:
    """F-12: rows [1, 3, pad ...] and [5, pad ...]."""
    rows, mask = torch.full((2, width), filling), torch.zeros(2, width, dtype=torch.bool)
    rows[0, :2], rows[1, 0] = torch.tensor([1.0, 3.0]), 5.0
    mask[0, :2], mask[1, 0] = True, True
    whitened = whiten(rows.flatten(), mask.flatten(), bessel=False)
    assert whitened[mask.flatten()].tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449], abs=1e-6)
    assert not whitened[~mask.flatten()].any()


@pytest.mark.parametrize("bessel", [False, True])
@pytest.mark.parametrize(
    "values", [[], [3.0], [0.3, 0.1 + 0.2, 0.3], [1e6, 1e6 + 0.0625, 1e6]], ids=["none", "one", "noise", "large"]
)
def test_entries_that_do_not_differ_are_whitened_to_zero(values: list[float], bessel: bool) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    assert whiten(x, true(len(x)), bessel=bessel).tolist() == [0.0] * len(x)


@pytest.mark.parametrize("bessel", [False, True])
def test_whitening_by_summed_moments_is_whitening_of_the_whole(bessel: bool) -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 7
    mask = torch.arange(50) % 3 > 0
    parts = [(x[:20], mask[:20]), (x[20:21], mask[20:21]), (x[21:], mask[21:])]
    total = torch.stack([moments(*part) for part in parts]).sum(0)
    pieces = torch.cat([whiten(*part, bessel=bessel, batch_moments=total) for part in parts])
    assert torch.allclose(pieces, whiten(x, mask, bessel=bessel), atol=1e-12)
    mean, variance = mean_and_variance(total, bessel=bessel)
    assert mean.item() == pytest.approx(x[mask].mean().item())
    assert variance.item() == pytest.approx(x[mask].var(correction=int(bessel)).item())


def test_explained_variance_has_no_data_where_returns_do_not_differ() -> None:
    returns, values = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.2, 0.5, 0.9])
    assert explained_variance(moments(returns - values, true(3)), moments(returns, true(3))).isnan()
    nothing = moments(torch.tensor([math.nan]), torch.tensor([False]))
    assert explained_variance(nothing, nothing).isnan()


def test_explained_variance_is_one_for_perfect_and_zero_for_constant_values() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert explained_variance(moments(torch.zeros(3), true(3)), moments(returns, true(3))).item() == 1.0
    assert explained_variance(moments(returns - 0.4, true(3)), moments(returns, true(3))).item() == pytest.approx(0.0)


def test_overlong_penalty_rises_in_the_buffer_only() -> None:
    penalty = overlong_penalty(torch.tensor([0, 80, 90, 100, 500]), max_length=100, buffer=20)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_first_visit_of_a_prompt_smooths_nothing() -> None:
    new = torch.tensor([1.0, -1.0])
    assert torch.equal(smoothed_advantages(new, new, 1), new)


def test_optimal_baseline_ignores_unscorable_and_survives_no_weight() -> None:
    weights, norms = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([1.0, 3.0, 1.0])
    assert optimal_baseline(weights, norms, torch.tensor([1.0, 0.0, math.nan])).item() == 0.25
    assert optimal_baseline(torch.zeros(2), torch.ones(2), torch.ones(2)).item() == 0.0


def test_learning_rate_is_never_raised() -> None:
    assert off_policy_lr_scale(torch.tensor(4.0), 4).item() == 1.0
    assert off_policy_lr_scale(torch.tensor(4.0), 4, base=0.5).item() == 1.0
    assert off_policy_lr_scale(torch.tensor(1.0), 4).item() == 0.5


@pytest.mark.parametrize(("drift", "kept"), [(0.0, 0.96), (10.0, 0.875), (0.006, 2**-0.1)])
def test_success_rate_forgets_by_drift_within_bounds(drift: float, kept: float) -> None:
    before = SuccessRate(torch.tensor(4.0), torch.tensor(2.0))
    after = before.updated(torch.tensor(0.0), torch.tensor(drift))
    assert after.alpha.item() == pytest.approx(4.0 * kept)
    assert after.beta.item() == pytest.approx(2.0 * kept + 1.0)


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0.0, 1.0)), max_size=30), st.integers(0, 8))
def test_success_rate_stays_between_zero_and_one(steps: list[tuple[int, float]], successes: int) -> None:
    rate = SuccessRate.from_trials(torch.tensor(float(successes)), 8)
    for reward, drift in steps:
        assert 0.0 < rate.value.item() < 1.0
        rate = rate.updated(torch.tensor(float(reward)), torch.tensor(drift))
    assert 0.0 < rate.value.item() < 1.0


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_leave_one_out_is_the_mean_baseline_stretched(rewards: list[float]) -> None:
    x, ids = torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.int64)
    plain = group_advantages(x, ids, scale="none").advantages
    others = group_advantages(x, ids, scale="none", leave_one_out=True)
    assert torch.allclose(others.advantages, plain * len(rewards) / (len(rewards) - 1))
    if others.informative.all():
        by_hand = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
        assert others.advantages.tolist() == pytest.approx(by_hand, abs=1e-9)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=9), st.sampled_from(SCALES))
def test_group_advantages_are_finite_and_add_up_to_nothing(rewards: list[float | None], scale: Any) -> None:
    result = group_advantages(rewards_tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), scale=scale)
    assert torch.isfinite(result.advantages).all()
    size = result.advantages.abs().max().item()
    assert result.advantages.sum().item() == pytest.approx(0.0, abs=1e-9 * max(size, 1.0))
    assert not result.advantages[~result.informative].any()
