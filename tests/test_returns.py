"""GAE, V-trace and rewards of tokens, against plain definitions and at their limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.returns import (
    advantages_and_returns,
    gae,
    kl_shaped_rewards,
    length_adaptive_lambda,
    rewards_at_last_token,
    scorable_tokens,
    vtrace,
)

VALUES = torch.tensor([0.4, 0.4, 0.4])
NOTHING = torch.zeros(3)
ONE = torch.zeros(3, dtype=torch.int64)
ALL = torch.ones(3, dtype=torch.bool)


def test_length_stop_as_terminal_takes_the_value_away() -> None:
    """F-13: what an end-of-sequence stop always gives."""
    assert gae(VALUES, NOTHING, ONE, ALL, gamma=1.0, lam=1.0).tolist() == pytest.approx([-0.4, -0.4, -0.4])


def test_length_stop_with_bootstrap_goes_on_with_the_value() -> None:
    """F-13."""
    bootstrap = torch.tensor([0.4])
    assert gae(VALUES, NOTHING, ONE, ALL, gamma=1.0, lam=1.0, bootstrap=bootstrap).tolist() == pytest.approx([0, 0, 0])
    advantages, targets = vtrace(VALUES, NOTHING, NOTHING, ONE, ALL, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    assert advantages.tolist() == pytest.approx([0, 0, 0])
    assert targets.tolist() == pytest.approx([0.4, 0.4, 0.4])


def test_only_the_trajectory_that_was_cut_is_bootstrapped() -> None:
    ids, bootstrap = torch.tensor([0, 1]), torch.tensor([0.0, 2.0])
    advantages = gae(torch.tensor([0.5, 0.5]), torch.zeros(2), ids, ALL[:2], gamma=0.5, lam=1.0, bootstrap=bootstrap)
    assert advantages.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("filling", [0.0, 1000.0, math.nan, math.inf])
def test_observations_are_neither_steps_nor_read(filling: float) -> None:
    mask = torch.tensor([False, True, True, False, True, False])
    values, rewards = torch.full((6,), filling), torch.full((6,), filling)
    values[mask], rewards[mask] = torch.tensor([0.2, 0.5, 0.4]), torch.tensor([0.0, 0.0, 1.0])
    for lam, expected in ((1.0, [0.8, 0.5, 0.6]), (0.95, [0.7465, 0.47, 0.6])):
        advantages, returns = advantages_and_returns(
            values, rewards, torch.zeros(6, dtype=torch.int64), mask, gamma=1.0, lam_policy=lam, lam_value=1.0
        )
        assert advantages[mask].tolist() == pytest.approx(expected)
        assert returns[mask].tolist() == pytest.approx([1.0, 1.0, 1.0])
        assert not advantages[~mask].any()
        assert not returns[~mask].any()


def by_definition(values: list[float], rewards: list[float], gamma: float, lam: float, after: float) -> list[float]:
    """A_t = sum over k of (gamma lam)^k delta_(t+k), for one trajectory without observations."""
    following = [*values[1:], after][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, rewards, seq_ids, loss_mask) of a few trajectories, their tokens shuffled together in order of time."""
    count = draw(st.integers(1, 25))
    numbers = st.lists(st.floats(-5, 5), min_size=count, max_size=count)
    ids = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    mask = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    values, rewards = (torch.tensor(draw(numbers), dtype=torch.float64) for _ in range(2))
    return values, rewards, torch.tensor(ids), torch.tensor(mask)


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_definition_on_the_compacted_trajectory(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], gamma: float, lam: float
) -> None:
    values, rewards, ids, mask = batch
    bootstrap = torch.tensor([0.0, 1.0, -2.0, 0.5], dtype=torch.float64)[: int(ids.max()) + 1]
    advantages = gae(values, rewards, ids, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for seq in range(len(bootstrap)):
        own = mask & (ids == seq)
        expected = by_definition(values[own].tolist(), rewards[own].tolist(), gamma, lam, bootstrap[seq].item())
        assert advantages[own].tolist() == pytest.approx(expected, abs=1e-9)
    assert not advantages[~mask].any()


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_on_policy_vtrace_is_gae(batch: tuple[Tensor, Tensor, Tensor, Tensor], gamma: float, lam: float) -> None:
    values, rewards, ids, mask = batch
    expected = gae(values, rewards, ids, mask, gamma=gamma, lam=lam)
    advantages, targets = vtrace(values, rewards, torch.zeros_like(values), ids, mask, gamma=gamma, lam=lam)
    assert torch.allclose(advantages, expected)
    assert torch.allclose(targets, torch.where(mask, values + expected, 0.0))


@given(batches(), st.floats(-3, 3))
def test_vtrace_error_is_its_advantage_where_both_ratios_stop_at_one(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], scale: float
) -> None:
    values, rewards, ids, mask = batch
    log_ratios = scale * torch.sin(torch.arange(len(values), dtype=torch.float64))
    advantages, targets = vtrace(values, rewards, log_ratios, ids, mask, gamma=0.9, lam=0.8)
    assert torch.allclose(advantages[mask], (targets - values)[mask])


@pytest.mark.parametrize("log_ratio", [math.nan, math.inf, -math.inf])
def test_vtrace_token_without_a_finite_ratio_counts_nothing(log_ratio: float) -> None:
    advantages, targets = vtrace(
        VALUES, torch.ones(3), torch.tensor([0.0, log_ratio, 0.0]), ONE, ALL, gamma=1.0, lam=1.0
    )
    assert advantages[1].item() == 0.0
    assert targets[1].item() == pytest.approx(0.4)
    assert torch.isfinite(advantages).all()


def test_each_trajectory_has_its_own_lambda() -> None:
    values, rewards = torch.tensor([0.2, 0.5, 0.4] * 2), torch.tensor([0.0, 0.0, 1.0] * 2)
    ids, lam = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 0.0])
    advantages = gae(values, rewards, ids, torch.ones(6, dtype=torch.bool), gamma=1.0, lam=lam)
    assert advantages.tolist() == pytest.approx([0.8, 0.5, 0.6, 0.3, -0.1, 0.6])


def test_estimates_keep_dtype_and_carry_no_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    assert gae(values, NOTHING, ONE, ALL, gamma=1.0, lam=1.0).dtype == torch.float32
    assert gae(values.bfloat16(), NOTHING, ONE, ALL, gamma=1.0, lam=1.0).dtype == torch.float32
    assert gae(values.double(), NOTHING, ONE, ALL, gamma=1.0, lam=1.0).dtype == torch.float64
    advantages, returns = advantages_and_returns(values, NOTHING, ONE, ALL, gamma=1.0, lam_policy=1.0, lam_value=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_nothing_sampled_gives_nothing() -> None:
    none = torch.zeros(3, dtype=torch.bool)
    assert gae(VALUES, NOTHING, ONE, none, gamma=1.0, lam=1.0).tolist() == [0.0, 0.0, 0.0]
    empty = torch.zeros(0)
    assert gae(empty, empty, ONE[:0], ALL[:0], gamma=1.0, lam=1.0).shape == (0,)


@pytest.mark.parametrize(("length", "expected"), [(0, 1 / 3), (1, 1 / 3), (2, 2 / 3), (10**9, 1.0)])
def test_length_adaptive_lambda(length: int, expected: float) -> None:
    assert length_adaptive_lambda(torch.tensor([length]), 1.5).item() == pytest.approx(expected)


def test_length_adaptive_lambda_is_never_below_zero() -> None:
    assert length_adaptive_lambda(torch.tensor([1, 10, 20]), 0.05).tolist() == [0.0, 0.0, 0.0]


def test_reward_lies_at_the_last_sampled_token() -> None:
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, False, False, True])
    assert rewards_at_last_token(torch.tensor([3.0, 5.0, 7.0]), ids, mask).tolist() == [0.0, 3.0, 0.0, 0.0, 0.0, 7.0]


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_is_given_to_no_token(missing: float) -> None:
    assert rewards_at_last_token(torch.tensor([missing, 2.0]), torch.tensor([0, 0, 1]), ALL).tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
def test_unscorable_trajectory_is_left_out_of_value_learning(missing: float) -> None:
    """F-21, single rollouts."""
    ids, rewards = torch.tensor([0, 0, 1]), torch.tensor([missing, 1.0])
    mask = scorable_tokens(rewards, ids, ALL)
    assert mask.tolist() == [False, False, True]
    advantages, returns = advantages_and_returns(
        VALUES, rewards_at_last_token(rewards, ids, mask), ids, mask, gamma=1.0, lam_policy=1.0, lam_value=1.0
    )
    assert advantages.tolist() == pytest.approx([0.0, 0.0, 0.6])
    assert returns.tolist() == pytest.approx([0.0, 0.0, 1.0])


def test_kl_in_the_reward_is_charged_on_sampled_tokens() -> None:
    logprobs, ref = torch.tensor([-1.0, -1.0, math.nan]), torch.tensor([-2.0, -0.5, math.nan])
    mask = torch.tensor([True, True, False])
    assert kl_shaped_rewards(torch.tensor([0.0, 1.0, math.nan]), logprobs, ref, mask, 0.1).tolist() == pytest.approx(
        [-0.1, 1.05, 0.0]
    )
