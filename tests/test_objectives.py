"""Losses and their aggregation: cuts into micro-batches, masks, limits, signs, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.importance import Band, Surrogate, at_level, clip, double_sided_mask, log_ratio, ratio, score
from learner.objectives import (
    Metrics,
    entropy_loss,
    kl_estimates,
    kl_loss,
    nll_loss,
    policy_loss,
    token_weights,
    value_loss,
)

AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Metrics]]  # logprobs, something beside them, weights

LOSSES: dict[str, Loss] = {
    "clip": lambda x, other, weights: policy_loss(
        clip(log_ratio(x, other), torch.ones_like(other), Band.from_offsets(0.2, 0.28)), torch.ones_like(other), weights
    ),
    "mask": lambda x, other, weights: policy_loss(
        double_sided_mask(log_ratio(x, other), x, Band.from_offsets(0.3, 5.0)), torch.ones_like(other), weights
    ),
    "plain": lambda x, other, weights: policy_loss(score(x), other, weights),
    "k2": lambda x, other, weights: kl_loss(x, other, weights, "k2"),
    "k3": lambda x, other, weights: kl_loss(x, other, weights, "k3"),
    "k1 corrected": lambda x, other, weights: kl_loss(x, other, weights, "k1", sampler_logprobs=other),
    "entropy": lambda x, other, weights: entropy_loss(x, weights),
    "nll": lambda x, other, weights: nll_loss(x, weights),
    "value": lambda x, other, weights: value_loss(x, other, weights),
    "clipped value": lambda x, other, weights: value_loss(x, other, weights, old_values=other, clip_range=0.2),
}


def weights_of(mask: Tensor, ids: Tensor, aggregation: Any, **more: Any) -> Tensor:
    """Weights with the counts of this batch, or of the ids and mask of the whole one."""
    num_tokens = int(mask.sum())
    num_seqs = len(ids[mask].unique())
    return token_weights(
        mask,
        ids,
        aggregation,
        **({"num_tokens": num_tokens, "num_seqs": num_seqs, "max_length": 10} | more),
    )


def gradient_of(loss: Loss, x: Tensor, other: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Metrics]:
    leaf = x.detach().clone().requires_grad_()
    value, metrics = loss(leaf, other, weights)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value, gradient, metrics


# --- aggregation


def cut(mask: Tensor, ids: Tensor, parts: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """(positions, ids from 0) of micro-batches that hold the given trajectories."""
    pieces = []
    for part in parts:
        positions = torch.cat([(ids == seq).nonzero().squeeze(1) for seq in part])
        pieces.append((positions, torch.unique(ids[positions], return_inverse=True)[1]))
    return pieces


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0]]], ids=["whole", "two", "turned round"])
def test_token_mean_does_not_depend_on_micro_batches(parts: list[list[int]]) -> None:
    """F-11: responses of 1 and 9 tokens with losses 1 and 0; a mean of means would give 0.5."""
    losses, ids = torch.tensor([1.0] + [0.0] * 9), torch.tensor([0] + [1] * 9)
    mask = torch.ones(10, dtype=torch.bool)
    total = 0.0
    for positions, own in cut(mask, ids, parts):
        weights = token_weights(mask[positions], own, "token_mean", num_tokens=10, num_seqs=2)
        surrogate = Surrogate(-losses[positions], mask[positions], torch.zeros(len(positions)))
        total += policy_loss(surrogate, torch.ones(len(positions)), weights)[0].item()
    assert total == pytest.approx(0.1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3]], [[3, 1], [2, 0]]], ids=["ones", "random order"])
def test_loss_gradient_and_metrics_add_up_over_micro_batches(
    name: str, aggregation: Any, parts: list[list[int]]
) -> None:
    """F-11; trajectory 2 is wholly masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.tensor([0] * 1 + [1] * 9 + [2] * 3 + [3] * 4)
    x, other = (-torch.rand(17, generator=generator) - 0.5 for _ in range(2))
    mask = (ids != 2) & (torch.arange(17) % 5 != 4)
    counts = {"num_tokens": int(mask.sum()), "num_seqs": 3}
    whole, gradient, metrics = gradient_of(LOSSES[name], x, other, weights_of(mask, ids, aggregation, **counts))
    value, pieces, sums = torch.zeros(()), torch.zeros(17), dict.fromkeys(metrics, 0.0)
    for positions, own in cut(mask, ids, parts):
        weights = weights_of(mask[positions], own, aggregation, **counts)
        part, part_gradient, part_metrics = gradient_of(LOSSES[name], x[positions], other[positions], weights)
        value = value + part
        pieces[positions] += part_gradient
        sums = {key: sums[key] + part_metrics[key].item() for key in sums}
    assert value.item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(pieces, gradient, atol=1e-6)
    assert sums == pytest.approx({key: number.item() for key, number in metrics.items()}, rel=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [0.25, 0.25, 0.25, 0.0, 0.25]),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 0.0, 0.5]),
        ("sequence_sum", [0.5, 0.5, 0.5, 0.0, 0.5]),
        ("fixed_length", [0.05, 0.05, 0.05, 0.0, 0.05]),
    ],
)
def test_share_of_each_token(aggregation: Any, expected: list[float]) -> None:
    mask, ids = torch.tensor([True, True, True, False, True]), torch.tensor([0, 0, 0, 0, 1])
    assert weights_of(mask, ids, aggregation).tolist() == pytest.approx(expected)


def test_fixed_length_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length"):
        token_weights(torch.tensor([True]), torch.tensor([0]), "fixed_length", num_tokens=1, num_seqs=1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_wholly_masked_trajectories_change_no_share(aggregation: Any, mask: list[bool]) -> None:
    trained, ids = torch.tensor(mask), torch.arange(len(mask)) // 3
    alone = weights_of(trained, ids, aggregation)
    padded = weights_of(
        torch.cat((trained, torch.zeros(4, dtype=torch.bool))),
        torch.cat((ids, torch.full((4,), int(ids.max()) + 1))),
        aggregation,
    )
    assert torch.equal(padded[: len(mask)], alone)
    assert not padded[len(mask) :].any()
    if aggregation in ("token_mean", "sequence_mean") and trained.any():
        assert alone.sum().item() == pytest.approx(1.0, rel=1e-6)


# --- masks and limits


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sick", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_has_no_influence(name: str, sick: float) -> None:
    x, other = torch.tensor([-1.0, sick, -0.5]), torch.tensor([-1.1, sick, -0.6])
    weights = torch.tensor([0.5, 0.0, 0.5])
    value, gradient, metrics = gradient_of(LOSSES[name], x, other, weights)
    alone = gradient_of(LOSSES[name], x[[0, 2]], other[[0, 2]], weights[[0, 2]])
    assert value.item() == alone[0].item()
    assert gradient.tolist() == [alone[1][0].item(), 0.0, alone[1][1].item()]
    assert {key: number.item() for key, number in metrics.items()} == {key: n.item() for key, n in alone[2].items()}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_masked_batch_has_loss_zero_and_no_gradient(name: str, count: int) -> None:
    """F-10: metrics hold counts, here 0, so that what is shown can say "no data"."""
    mask, ids = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
    for aggregation in AGGREGATIONS:
        weights = weights_of(mask, ids, aggregation)
        value, gradient, metrics = gradient_of(
            LOSSES[name], torch.full((count,), -1.0), torch.full((count,), -1.5), weights
        )
        assert value.item() == 0.0
        assert not gradient.any()
        assert not any(number.item() for number in metrics.values())


def test_sample_beside_an_empty_one_has_the_gradient_it_has_alone() -> None:
    """F-10: trajectory 0 sampled nothing; trajectory 1 sampled a lone end token, an ordinary sample."""
    x, other = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0, -2.2])
    mask, ids = torch.tensor([False, False, True]), torch.tensor([0, 0, 1])
    for aggregation in AGGREGATIONS:
        beside = gradient_of(LOSSES["clip"], x, other, weights_of(mask, ids, aggregation))[1]
        alone = gradient_of(LOSSES["clip"], x[2:], other[2:], weights_of(mask[2:], ids[2:] - 1, aggregation))[1]
        assert beside.tolist() == [0.0, 0.0, alone.item()]
        assert alone.item() != 0.0


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_overflowing_ratio_is_rejected_by_selection(advantage: float) -> None:
    """F-09 (a): trainer [-2, -1], behaviour [-91, -1], band [0.5, 2]."""
    logprobs = torch.tensor([-2.0, -1.0], requires_grad=True)
    advantages = torch.full((2,), advantage)
    x = log_ratio(logprobs, torch.tensor([-91.0, -1.0]))
    surrogate = double_sided_mask(x, logprobs, Band.from_ratios(0.5, 2.0))
    loss, metrics = policy_loss(surrogate, advantages, torch.tensor([0.5, 0.5]))
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -0.5 * advantage]
    assert metrics["policy/masked_high_tokens"].item() == 1


def test_everything_rejected_is_loss_zero() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    surrogate = ratio(log_ratio(logprobs, torch.tensor([-1.0, -1.0])))
    weights, advantages = torch.tensor([0.5, 0.5]), torch.ones(2)
    for rejection in ({"keep": torch.zeros(2, dtype=torch.bool)}, {"correction": torch.zeros(2)}):
        loss, metrics = policy_loss(surrogate, advantages, weights, **rejection)
        (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        assert loss.item() == 0.0
        assert not gradient.any()
        assert metrics["policy/rejected_tokens"].item() == metrics["policy/tokens"].item() == 2


def test_metrics_split_the_batch_into_disjoint_parts() -> None:
    w = torch.tensor([1.0, 0.1, 9.0, 0.1, 9.0, 1.0])
    logprobs = torch.full((6,), -1.0)
    surrogate = double_sided_mask(w.log(), logprobs, Band.from_offsets(0.3, 5.0))
    advantages = torch.tensor([1.0, 1.0, -1.0, 0.0, -1.0, 1.0])
    keep = torch.tensor([True, True, True, True, False, False])
    _, metrics = policy_loss(surrogate, advantages, torch.full((6,), 1 / 6), keep=keep)
    assert {key.removeprefix("policy/"): number.item() for key, number in metrics.items()} == {
        "tokens": 6,
        "rejected_tokens": 2,
        "masked_tokens": 3,
        "masked_low_tokens": 2,
        "masked_high_tokens": 1,
        "masked_positive_tokens": 1,
        "masked_negative_tokens": 1,
    }


def test_advantages_and_corrections_carry_no_gradient() -> None:
    advantages, correction = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    x = torch.zeros(1, requires_grad=True)
    policy_loss(ratio(x), advantages, torch.ones(1), correction=correction)[0].backward()
    assert x.grad is not None
    assert x.grad.item() == -1.0
    assert advantages.grad is None
    assert correction.grad is None


# --- gradients


@pytest.mark.parametrize(
    "name", ["clip", "k2", "k3", "k1 corrected", "entropy", "nll", "value", "clipped value", "plain"]
)
def test_gradient_is_the_numeric_one(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    x, other, weights = (torch.rand(12, generator=generator, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda leaf: LOSSES[name](leaf, -other, weights)[0], (-x.requires_grad_(),))


def test_rejected_and_corrected_gradient_is_the_numeric_one() -> None:
    generator = torch.Generator().manual_seed(6)
    x, other, weights, correction = (torch.rand(12, generator=generator, dtype=torch.float64) for _ in range(4))
    keep, ids, mask = torch.arange(12) % 3 > 0, torch.arange(12) // 4, torch.ones(12, dtype=torch.bool)

    def loss(leaf: Tensor) -> Tensor:
        ratios = at_level(log_ratio(leaf, other), ids, mask, "sequence")
        surrogate = clip(ratios, other - 0.5, Band.from_offsets(0.2, 0.2))
        return policy_loss(surrogate, other - 0.5, weights, correction=correction, keep=keep)[0]

    assert torch.autograd.gradcheck(loss, (x.requires_grad_(),))


# --- KL, entropy, value


def test_nonnegative_estimator() -> None:
    """F-15: log ratio reference minus policy."""
    d = torch.tensor([-1.0, -0.1, 0.1, 1.0])
    assert kl_estimates(-d, torch.zeros(4), "k3").tolist() == pytest.approx([0.3679, 0.0048, 0.0052, 0.7183], abs=1e-4)


@pytest.mark.parametrize(("estimator", "corrected"), [("k2", False), ("k3", False), ("k1", True), ("k3", True)])
def test_kl_term_brings_the_policy_to_the_reference(estimator: Any, corrected: bool) -> None:
    """F-15: all advantages 0, coefficient 0.1; expectations are exact sums over a vocabulary of five."""
    reference = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5]).log_softmax(0)
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.0], requires_grad=True)
    distances = []
    for _ in range(20):
        logprobs = logits.log_softmax(0)
        distances.append((logprobs.exp() * (logprobs - reference)).sum().item())
        sampler = logprobs if corrected else None
        loss, _ = kl_loss(logprobs, reference, logprobs.detach().exp(), estimator, sampler_logprobs=sampler)
        (gradient,) = torch.autograd.grad(0.1 * loss, logits)
        logits = (logits - 5.0 * gradient).detach().requires_grad_()
    assert all(after < before for before, after in pairwise(distances))
    assert distances[-1] < 0.3 * distances[0]


def test_k1_as_a_loss_without_its_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="k1"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), "k1")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_distant_policies_is_clamped_and_of_impossible_tokens_left_out(estimator: Any) -> None:
    logprobs = torch.tensor([-90.0, -1.0, -math.inf, -1.0], requires_grad=True)
    estimates = kl_estimates(logprobs, torch.tensor([-1.0, -90.0, -1.0, math.nan]), estimator)
    assert estimates.abs().max().item() <= 200.0
    assert estimates[2:].tolist() == [0.0, 0.0]
    estimates.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=8))
def test_k2_and_k3_are_never_negative_and_zero_for_equal_policies(pairs: list[tuple[float, float]]) -> None:
    logprobs, ref = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    for estimator in ("k2", "k3"):
        assert (kl_estimates(logprobs, ref, estimator) >= 0).all()
        assert not kl_estimates(logprobs, logprobs, estimator).any()


def test_entropy_loss_pushes_entropy_up() -> None:
    entropies = torch.tensor([1.0, 2.0], requires_grad=True)
    loss, metrics = entropy_loss(entropies, torch.tensor([0.5, 0.5]))
    loss.backward()
    assert loss.item() == -1.5
    assert entropies.grad is not None
    assert entropies.grad.tolist() == [-0.5, -0.5]
    assert metrics["entropy/sum"].item() / metrics["entropy/tokens"].item() == 1.5


def test_value_targets_carry_no_gradient() -> None:
    values, returns = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    value_loss(values, returns, torch.ones(1))[0].backward()
    assert values.grad is not None
    assert values.grad.item() == -2.0
    assert returns.grad is None


def test_value_clip_needs_both_its_parts() -> None:
    with pytest.raises(ValueError, match="old_values and clip_range"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), clip_range=0.2)


def test_clipped_value_that_would_overshoot_has_no_gradient() -> None:
    values = torch.tensor([0.8], requires_grad=True)
    loss, _ = value_loss(values, torch.tensor([1.0]), torch.ones(1), old_values=torch.tensor([0.5]), clip_range=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.09)
    assert values.grad is not None
    assert values.grad.item() == 0.0
