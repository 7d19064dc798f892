"""Off-policy corrections: bounds of staleness, sequence masks, interpolation, effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.corrections import (
    banded_weights,
    effective_sample_size,
    fresh_tokens,
    interpolated_proximal,
    low_k3_sequences,
    on_policy_or_positive,
    probability_shift_mask,
    second_moment_mask,
    truncated_weights,
    veto_free_sequences,
)
from learner.importance import Band, at_level, clip, double_sided_mask, log_ratio, ratio
from learner.objectives import policy_loss, token_weights

NOT_FINITE = [math.inf, -math.inf, math.nan]
TWO = torch.tensor([0, 0, 1])
ALL = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(("bound", "expected"), [(0, [False, False, True]), (2, [False, True, True]), (9, [True] * 3)])
def test_tokens_staler_than_the_bound_are_not_fresh(bound: int, expected: list[bool]) -> None:
    assert fresh_tokens(torch.tensor([3, 5, 7]), 7, bound).tolist() == expected


def test_stale_tokens_leave_the_numerator_only() -> None:
    """Mask mode of the staleness bound: the fresh token's gradient is what it was before any was rejected."""
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = token_weights(ALL, TWO, "token_mean", num_tokens=3, num_seqs=2)
    surrogate = ratio(log_ratio(logprobs, logprobs.detach()))
    keep = fresh_tokens(torch.tensor([1, 5, 6]), 6, 2)
    loss, metrics = policy_loss(surrogate, torch.ones(3), weights, keep=keep)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1 / 3, -1 / 3])
    assert metrics["policy/tokens"].item() == 3
    assert metrics["policy/rejected_tokens"].item() == 1


@pytest.mark.parametrize("sick", NOT_FINITE)
def test_weight_without_a_finite_ratio_is_zero(sick: float) -> None:
    x = torch.tensor([0.0, sick])
    assert truncated_weights(x, cap=2.0).tolist() == [1.0, 0.0]
    assert truncated_weights(x, cap=math.inf).tolist() == [1.0, 0.0]
    assert banded_weights(x, Band.from_ratios(0.0, math.inf)).tolist() == [1.0, 0.0]


def test_truncation_keeps_every_token_and_banding_drops_the_tails() -> None:
    x = torch.tensor([0.1, 0.5, 1.0, 2.0, 9.0]).log()
    assert truncated_weights(x, cap=2.0, floor=0.2).tolist() == pytest.approx([0.2, 0.5, 1.0, 2.0, 2.0])
    assert banded_weights(x.double(), Band.from_ratios(0.4, 2.5)).tolist() == pytest.approx([0, 0.5, 1, 2, 0], abs=1e-6)


def test_weights_carry_no_gradient() -> None:
    x = torch.tensor([0.1], requires_grad=True)
    assert not truncated_weights(x, cap=2.0).requires_grad
    assert not banded_weights(x, Band.from_ratios(0.5, 2.0)).requires_grad


@pytest.mark.parametrize("sick", [*NOT_FINITE, math.log(1e-5)])
def test_one_catastrophic_token_vetoes_its_sequence_alone(sick: float) -> None:
    kept = veto_free_sequences(torch.tensor([0.0, sick, 0.0]), TWO, ALL)
    assert kept.tolist() == ([True] * 3 if sick == math.inf else [False, False, True])


def test_veto_does_not_read_masked_tokens() -> None:
    mask = torch.tensor([True, False, True])
    assert veto_free_sequences(torch.tensor([0.0, math.nan, 0.0]), TWO, mask).all()
    assert low_k3_sequences(torch.tensor([0.0, math.nan, 0.0]), TWO, mask, 1e-3).all()


@pytest.mark.parametrize("sick", [*NOT_FINITE, 0.5, -0.5])
def test_mean_k3_punishes_both_directions(sick: float) -> None:
    assert low_k3_sequences(torch.tensor([0.0, sick, 0.01]), TWO, ALL, 0.01).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("advantage", "drop", "kept"), [(-1.0, 0.5, False), (-1.0, -0.5, True), (1.0, 0.5, True), (0.0, 0.5, True)]
)
def test_unlikely_sequence_is_dropped_only_for_negative_advantage(advantage: float, drop: float, kept: bool) -> None:
    anchor = torch.tensor([-1.0, -1.0, -1.0])
    logprobs = anchor - torch.tensor([drop, drop, 0.0])
    mask = on_policy_or_positive(logprobs, anchor, torch.full((3,), advantage), TWO, ALL)
    assert mask.tolist() == [kept, kept, True]


@pytest.mark.parametrize("sick", NOT_FINITE)
def test_second_moment_never_keeps_what_is_not_finite_or_masked(sick: float) -> None:
    mask = torch.tensor([True, True, False, True])
    keep = second_moment_mask(torch.tensor([0.1, sick, 0.0, -0.1]), mask)
    assert keep.tolist() == [True, False, False, True]


def test_second_moment_keeps_at_least_one_eligible_token() -> None:
    assert second_moment_mask(torch.tensor([3.0, 2.0, 4.0]), ALL).tolist() == [False, True, False]
    assert not second_moment_mask(torch.tensor([3.0, math.nan]), torch.zeros(2, dtype=torch.bool)).any()
    assert second_moment_mask(torch.zeros(0), ALL[:0]).shape == (0,)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(0.001, 1.0))
def test_second_moment_after_masking_is_below_the_bound(x: list[float], tau: float) -> None:
    log_ratios = torch.tensor(x, dtype=torch.float64)
    keep = second_moment_mask(log_ratios, torch.ones(len(x), dtype=torch.bool), tau)
    assert keep.any()
    assert log_ratios[keep].square().mean().item() < tau or keep.sum().item() == 1
    assert log_ratios[keep].abs().max() <= log_ratios[~keep].abs().min() if (~keep).any() else True
    if (~keep).any():  # one more token would have been too much
        following = log_ratios[~keep].square().min()
        kept_sum = log_ratios[keep].square().sum()
        assert (kept_sum + following).item() / (keep.sum().item() + 1) >= tau * (1 - 1e-9)


def test_probability_shift_looks_at_probabilities_and_signs() -> None:
    rollout, current = torch.tensor([0.5, 0.5, 0.01, 0.5]).log(), torch.tensor([0.8, 0.8, 0.1, 0.2]).log()
    keep = probability_shift_mask(current, rollout, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    # Tenfold on a rare token is a shift of 0.09: kept, where a ratio clip would not.
    assert keep.tolist() == [False, True, True, False]


def test_probability_of_zero_moves_by_what_was_there() -> None:
    keep = probability_shift_mask(
        torch.tensor([-math.inf, math.nan]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, 1.0])
    )
    assert keep.tolist() == [False, False]


@pytest.mark.parametrize("linear", [False, True])
def test_interpolation_stays_between_its_ends_and_skips_unsampled_tokens(linear: bool) -> None:
    rollout, current = torch.tensor([-1.0, -1.0, 0.0]), torch.tensor([-2.0, -0.5, math.nan]).requires_grad_()
    proximal = interpolated_proximal(current, rollout, torch.tensor([2, 6, -1]), 6, linear=linear)
    assert -2.0 < proximal[0].item() < -1.0
    assert proximal[1].item() == pytest.approx(-1.0)
    assert proximal[2].item() == 0.0 if not linear else True
    assert not proximal.requires_grad


def test_effective_sample_size_counts_equal_weights_fully_and_one_giant_as_one() -> None:
    assert effective_sample_size(torch.full((7,), 0.3)).item() == pytest.approx(7.0)
    assert effective_sample_size(torch.tensor([1e9, 1.0, 1.0])).item() == pytest.approx(1.0)
    assert effective_sample_size(torch.zeros(3)).item() == 0.0
    assert effective_sample_size(torch.zeros(0)).item() == 0.0


def log_probs(draw: st.DrawFn, count: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.floats(-5, -0.01), min_size=count, max_size=count)), dtype=torch.float64)


@st.composite
def three_policies(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(current, proximal, rollout log-probs, advantages), [N]."""
    count = draw(st.integers(1, 10))
    advantages = torch.tensor(draw(st.lists(st.floats(-3, 3), min_size=count, max_size=count)), dtype=torch.float64)
    return log_probs(draw, count), log_probs(draw, count), log_probs(draw, count), advantages


def policy_gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    return torch.autograd.grad(loss, logprobs)[0]


@given(three_policies())
def test_double_sided_mask_is_icepop_where_the_proximal_policy_is_the_current_one(
    policies: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    logprobs, _, rollout, advantages = policies
    logprobs.requires_grad_()
    weights, band = torch.ones_like(advantages), Band.from_offsets(0.3, 5.0)
    w = log_ratio(logprobs, rollout)
    one = policy_loss(double_sided_mask(w, logprobs, band), advantages, weights)[0]
    same = ratio(log_ratio(logprobs, logprobs.detach()))
    two = policy_loss(same, advantages, weights, correction=banded_weights(w, band))[0]
    assert torch.allclose(policy_gradient(one, logprobs), policy_gradient(two, logprobs))


@given(three_policies())
def test_decoupled_loss_is_ppo_where_nothing_was_stale(policies: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logprobs, proximal, _, advantages = policies
    logprobs.requires_grad_()
    weights = torch.ones_like(advantages)
    surrogate = clip(log_ratio(logprobs, proximal), advantages, Band.from_offsets(0.2, 0.2))
    rho = truncated_weights(log_ratio(proximal, proximal), cap=math.inf)
    plain = policy_loss(surrogate, advantages, weights)[0]
    decoupled = policy_loss(surrogate, advantages, weights, correction=rho)[0]
    assert plain.item() == decoupled.item()
    assert torch.equal(
        torch.autograd.grad(plain, logprobs, retain_graph=True)[0],
        torch.autograd.grad(decoupled, logprobs, retain_graph=True)[0],
    )


@given(three_policies())
def test_decoupled_gradient_is_the_masked_one_on_tokens_that_neither_touches(
    policies: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    logprobs, proximal, rollout, advantages = policies
    logprobs.requires_grad_()
    weights, band = torch.ones_like(advantages), Band.from_offsets(0.2, 0.2)
    surrogate = clip(log_ratio(logprobs, proximal), advantages, band)
    rho = truncated_weights(log_ratio(proximal, rollout), cap=math.inf)
    w = double_sided_mask(log_ratio(logprobs, rollout), logprobs, Band.from_offsets(0.8, 3.0))
    both = surrogate.active & w.active
    one = policy_gradient(policy_loss(surrogate, advantages, weights, correction=rho)[0], logprobs)
    two = policy_gradient(policy_loss(w, advantages, weights)[0], logprobs)
    assert torch.allclose(one[both], two[both])


@given(three_policies())
def test_level_of_sequences_does_not_change_what_all_tokens_share(
    policies: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    rho = torch.full_like(policies[0], 0.3)
    ids, mask = torch.zeros(len(rho), dtype=torch.int64), torch.ones(len(rho), dtype=torch.bool)
    assert torch.allclose(at_level(rho, ids, mask, "sequence"), rho)
    assert torch.allclose(at_level(rho, ids, mask, "sequence_product"), rho * len(rho))
