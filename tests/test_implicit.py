"""Values implied by the policy, and offline optimal values: regressions over whole trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.implicit import a_star_loss, implicit_rewards, implicit_value_loss, optimal_value

IDS = torch.tensor([0, 0, 1, 1, 2])
ALL = torch.ones(5, dtype=torch.bool)
REF = torch.full((5,), -1.0, dtype=torch.float64)
LOGPROBS = torch.tensor([-0.9, -1.2, -1.0, -0.5, -3.0], dtype=torch.float64)
REWARDS = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)


def implicit(logprobs: Tensor, rewards: Tensor, mask: Tensor = ALL, ids: Tensor = IDS) -> Tensor:
    terms = implicit_rewards(logprobs, REF[: len(ids)], torch.full((len(ids),), 0.01, dtype=torch.float64), 0.1)
    return implicit_value_loss(terms, rewards, ids, mask, num_seqs=3)[0]


def a_star(logprobs: Tensor, rewards: Tensor, mask: Tensor = ALL, ids: Tensor = IDS) -> Tensor:
    values = torch.zeros_like(rewards)
    return a_star_loss(logprobs, REF[: len(ids)], rewards, values, ids, mask, beta=0.1, num_seqs=3)[0]


@pytest.mark.parametrize("loss", [implicit, a_star])
def test_gradient_is_the_numeric_one(loss: Any) -> None:
    assert torch.autograd.gradcheck(lambda x: loss(x, REWARDS), (LOGPROBS.clone().requires_grad_(),))


def test_exact_kl_and_reference_are_constants() -> None:
    kl, ref = torch.ones(5, requires_grad=True), REF.clone().requires_grad_()
    assert not implicit_rewards(LOGPROBS, ref, kl, 0.1).requires_grad


@pytest.mark.parametrize("loss", [implicit, a_star])
@pytest.mark.parametrize("sick", [math.nan, math.inf])
def test_unscorable_trajectory_and_masked_tokens_count_nothing(loss: Any, sick: float) -> None:
    logprobs = LOGPROBS.clone()
    logprobs[3] = sick
    logprobs.requires_grad_()
    rewards = torch.tensor([sick, -0.5, 0.7], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False, False])  # trajectory 2 sampled nothing
    value = loss(logprobs, rewards, mask)
    value.backward()
    kept = LOGPROBS[2:3].clone().requires_grad_()
    alone = loss(kept, rewards[1:2], ALL[:1], IDS[:1])
    alone.backward()
    assert value.item() == pytest.approx(alone.item())
    assert logprobs.grad is not None
    assert kept.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, kept.grad.item(), 0.0, 0.0])


@pytest.mark.parametrize("loss", [implicit, a_star])
@pytest.mark.parametrize("sick", [math.nan, math.inf, -math.inf])
def test_trajectory_with_a_log_ratio_that_is_not_finite_is_left_out(loss: Any, sick: float) -> None:
    logprobs = LOGPROBS.clone()
    logprobs[0] = sick
    logprobs.requires_grad_()
    value = loss(logprobs, REWARDS)
    value.backward()
    assert value.item() == pytest.approx(loss(LOGPROBS[2:], REWARDS[1:], ALL[2:], IDS[2:] - 1).item())
    assert logprobs.grad is not None
    assert logprobs.grad[:2].tolist() == [0.0, 0.0]
    assert logprobs.grad[2:].all()


@pytest.mark.parametrize("loss", [implicit, a_star])
def test_loss_adds_up_over_micro_batches(loss: Any) -> None:
    whole = loss(LOGPROBS, REWARDS)
    parts = [loss(LOGPROBS[:2], REWARDS[:1], ALL[:2], IDS[:2]), loss(LOGPROBS[2:], REWARDS[1:], ALL[2:], IDS[2:] - 1)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())


@pytest.mark.parametrize("loss", [implicit, a_star])
def test_no_trajectory_is_loss_zero(loss: Any) -> None:
    empty = LOGPROBS[:0].clone().requires_grad_()
    value = loss(empty, REWARDS[:0], ALL[:0], IDS[:0])
    value.backward()
    assert value.item() == 0.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.01, 100.0))
def test_optimal_value_lies_between_mean_and_largest_reward(rewards: list[float], beta: float) -> None:
    value = optimal_value(torch.tensor(rewards, dtype=torch.float64), beta).item()
    assert sum(rewards) / len(rewards) - 1e-9 <= value <= max(rewards) + 1e-9


def test_optimal_value_leaves_out_the_unscorable() -> None:
    assert optimal_value(torch.tensor([1.0, math.nan, 1.0]), 0.5).item() == pytest.approx(1.0)
    assert optimal_value(torch.tensor([math.nan]), 0.5).isnan()
