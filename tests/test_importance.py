"""Ratios, levels and trust regions: field numbers, tails, non-finite input, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.importance import (
    MAX_LOG_RATIO,
    Band,
    Surrogate,
    at_level,
    clip,
    double_sided_mask,
    gamma_weight,
    log_ratio,
    ratio,
    ratio_metrics,
    score,
    soft_gate,
    truncate,
)

Region = Callable[[Tensor, Tensor, Tensor], Surrogate]  # log ratios, logprobs, advantages

REGIONS: dict[str, Region] = {
    "none": lambda x, logprobs, advantages: ratio(x),
    "score": lambda x, logprobs, advantages: score(logprobs),
    "clip": lambda x, logprobs, advantages: clip(x, advantages, Band.from_offsets(0.2, 0.28)),
    "dual clip": lambda x, logprobs, advantages: clip(x, advantages, Band.from_offsets(0.2, 0.2), 3.0),
    "mask": lambda x, logprobs, advantages: double_sided_mask(x, logprobs, Band.from_offsets(0.3, 5.0)),
    "truncate": lambda x, logprobs, advantages: truncate(x, logprobs, cap=5.0),
    "soft gate": lambda x, logprobs, advantages: soft_gate(x, advantages),
    "gamma": lambda x, logprobs, advantages: gamma_weight(x, logprobs, advantages),
}
NOT_FINITE = [math.inf, -math.inf, math.nan]


def loss_of(region: Region, logprobs: Tensor, reference: Tensor, advantages: Tensor) -> Tensor:
    return -(advantages * region(log_ratio(logprobs, reference), logprobs, advantages).value).sum()


def test_ratio_is_one_only_if_the_learner_divides_logits_by_the_temperature() -> None:
    """F-08."""
    logits, temperature = torch.tensor([2.0, 1.0, 0.0, -1.0]), 0.6
    rollout = (logits / temperature).log_softmax(0)
    assert rollout.tolist() == pytest.approx([-0.2081, -1.8747, -3.5414, -5.2081], abs=1e-4)
    assert log_ratio((logits / temperature).log_softmax(0), rollout).exp().tolist() == [1.0] * 4
    forgotten = log_ratio(logits.log_softmax(0), rollout).exp()
    assert forgotten.tolist() == pytest.approx([0.793, 1.544, 3.008, 5.858], abs=1e-3)
    divided = log_ratio(logits.log_softmax(0) / temperature, rollout).exp()
    assert divided.tolist() == pytest.approx([1 / 1.691] * 4, abs=1e-3)


@pytest.mark.parametrize(("factor", "side"), [(10.0, "high"), (0.1, "low")])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_correction_against_the_behaviour_policy_is_active(factor: float, side: str, advantage: float) -> None:
    """F-14: the learner has moved since the rollout; a denominator of its own would show a ratio of 1."""
    rollout = torch.tensor([0.05, 0.5]).log()
    logprobs = torch.tensor([0.05 * factor, 0.5]).log().requires_grad_()
    surrogate = double_sided_mask(log_ratio(logprobs, rollout), logprobs, Band.from_ratios(0.5, 2.0))
    assert surrogate.log_ratios.exp()[0].item() == pytest.approx(factor, abs=1e-3)
    assert surrogate.active.tolist() == [False, True]
    assert (surrogate.log_ratios[0] > 0).item() == (side == "high")
    (-advantage * surrogate.value.sum()).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -advantage]


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("name", ["mask", "truncate", "clip", "soft gate", "gamma", "none"])
def test_ratio_that_overflows_float32_stays_finite(name: str, advantage: float) -> None:
    """F-09 (a): trainer [-2, -1], behaviour [-91, -1]."""
    logprobs, rollout = torch.tensor([-2.0, -1.0], requires_grad=True), torch.tensor([-91.0, -1.0])
    loss = loss_of(REGIONS[name], logprobs, rollout, torch.full((2,), advantage))
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    if name == "mask":
        assert logprobs.grad.tolist() == [0.0, -advantage]


@pytest.mark.parametrize("sick", NOT_FINITE)
@pytest.mark.parametrize(
    ("name", "where"),
    # A plain policy gradient has no reference.
    [
        (name, where)
        for name in REGIONS
        for where in ("logprobs", "reference")
        if (name, where) != ("score", "reference")
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_token_without_a_finite_ratio_leaves_value_and_gradient(
    name: str, sick: float, where: str, advantage: float
) -> None:
    logprobs, reference = torch.tensor([-1.0, -1.2]), torch.tensor([-1.1, -1.1])
    (logprobs if where == "logprobs" else reference)[0] = sick
    logprobs.requires_grad_()
    advantages = torch.full((2,), advantage)
    surrogate = REGIONS[name](log_ratio(logprobs, reference), logprobs, advantages)
    assert surrogate.value[0].item() == 0.0
    assert not surrogate.active[0]
    surrogate.value.sum().backward()
    alone = torch.tensor([-1.2], requires_grad=True)
    REGIONS[name](log_ratio(alone, torch.tensor([-1.1])), alone, advantages[:1]).value.sum().backward()
    assert logprobs.grad is not None
    assert alone.grad is not None
    assert logprobs.grad.tolist() == [0.0, alone.grad.item()]


@pytest.mark.parametrize("log_value", [-200.0, -0.7, 2.0, 200.0], ids=["underflow", "low", "high", "overflow"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_token_outside_the_double_sided_band_gets_no_gradient(log_value: float, advantage: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    reference = logprobs.detach() - log_value
    loss_of(REGIONS["mask"], logprobs, reference, torch.tensor([advantage])).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize(
    ("ratio_value", "advantage", "has_gradient"),
    [(1.5, 1, False), (0.5, 1, True), (1.5, -1, True), (0.5, -1, False), (5.0, -1, False), (1.1, 1, True)],
)
def test_clip_is_one_sided_and_dual_clip_caps_the_other(ratio_value: float, advantage: int, has_gradient: bool) -> None:
    x = torch.tensor([math.log(ratio_value)], requires_grad=True)
    surrogate = clip(x, torch.tensor([float(advantage)]), Band.from_offsets(0.2, 0.2), 3.0)
    surrogate.value.sum().backward()
    assert x.grad is not None
    assert (x.grad.item() != 0.0) == has_gradient == surrogate.active.item()


def test_band_from_offsets_is_not_band_from_ratios() -> None:
    assert [math.exp(end) for end in Band.from_offsets(0.3, 5.0)] == pytest.approx([0.7, 6.0])
    assert [math.exp(end) for end in Band.from_ratios(0.3, 5.0)] == pytest.approx([0.3, 5.0])
    per_token = Band.from_offsets(torch.tensor([0.3, 1.5]), torch.tensor([5.0, 0.2]))
    assert torch.as_tensor(per_token.log_low).exp().tolist() == pytest.approx([0.7, 0.0])
    assert torch.as_tensor(per_token.log_high).exp().tolist() == pytest.approx([6.0, 1.2])


@pytest.mark.parametrize("band", [Band.from_offsets(1.0, math.inf), Band.from_ratios(0.0, math.inf)])
def test_band_without_bounds_holds_everything_but_nan(band: Band) -> None:
    assert band.contains(torch.tensor([-300.0, 0.0, 300.0, math.nan]), closed=False).tolist() == [
        True,
        True,
        True,
        False,
    ]


def test_closed_band_holds_its_bounds_and_open_band_does_not() -> None:
    edges = torch.tensor([math.log(0.5), math.log(2.0)], dtype=torch.float64)
    band = Band.from_ratios(0.5, 2.0)
    assert band.contains(edges, closed=True).all()
    assert not band.contains(edges, closed=False).any()


def test_bfloat16_log_probs_are_subtracted_in_float32() -> None:
    assert log_ratio(torch.zeros(1, dtype=torch.bfloat16), torch.full((1,), -1e-3)).item() == pytest.approx(1e-3)


def test_reference_carries_no_gradient() -> None:
    reference = torch.tensor([-1.0], requires_grad=True)
    assert not log_ratio(torch.tensor([-1.0]), reference).requires_grad


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_sequence_level_is_the_geometric_mean_of_its_own_sampled_tokens(level: Any) -> None:
    x = torch.tensor([0.1, math.nan, 0.3, -0.4], requires_grad=True)
    ids, mask = torch.tensor([0, 0, 0, 1]), torch.tensor([True, False, True, True])
    levelled = at_level(x, ids, mask, level)
    assert levelled[mask].tolist() == pytest.approx([0.2, 0.2, -0.4])
    gradient = torch.autograd.grad(levelled[0], x)[0].tolist()
    assert gradient == pytest.approx([0.5, 0.0, 0.5, 0.0] if level == "sequence" else [1.0, 0.0, 0.0, 0.0])


def test_sequence_product_adds_the_logarithms() -> None:
    x, ids = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 0])
    assert at_level(x, ids, torch.ones(3, dtype=torch.bool), "sequence_product").tolist() == pytest.approx(
        [0.4, 0.2, 0.4]
    )


def test_one_sick_token_leaves_out_its_whole_sequence_and_no_other() -> None:
    logprobs = torch.tensor([-1.0, -math.inf, -1.0], requires_grad=True)
    ids, mask = torch.tensor([0, 0, 1]), torch.ones(3, dtype=torch.bool)
    x = at_level(log_ratio(logprobs, torch.full((3,), -1.0)), ids, mask, "sequence")
    surrogate = clip(x, torch.ones(3), Band.from_offsets(3e-4, 4e-4))
    assert surrogate.active.tolist() == [False, False, True]
    surrogate.value.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 1.0]


def five_by_four() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(20, generator=generator, dtype=torch.float64) - 0.2
    reference = logprobs + torch.randn(20, generator=generator, dtype=torch.float64) * 0.3
    return logprobs, reference, torch.randn(20, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_product"])
@pytest.mark.parametrize("name", ["none", "clip", "dual clip", "soft gate"])
def test_gradient_through_the_ratio_is_the_numeric_one(name: str, level: Any) -> None:
    logprobs, reference, advantages = five_by_four()
    ids, mask = torch.arange(20) // 4, torch.arange(20) % 7 > 0

    def loss(x: Tensor) -> Tensor:
        ratios = at_level(log_ratio(x, reference), ids, mask, level)
        return (advantages * REGIONS[name](ratios, x, advantages).value)[mask].sum()

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


@pytest.mark.parametrize("name", ["mask", "truncate", "gamma", "score"])
def test_gradient_with_a_constant_weight_is_the_numeric_one_of_the_frozen_weight(name: str) -> None:
    logprobs, reference, advantages = five_by_four()
    frozen = log_ratio(logprobs, reference)

    def loss(x: Tensor) -> Tensor:
        return (advantages * REGIONS[name](frozen, x, advantages).value).sum()

    assert torch.autograd.gradcheck(loss, (logprobs.clone().requires_grad_(),))
    live = logprobs.clone().requires_grad_()
    (-loss_of(REGIONS[name], live, reference, advantages)).backward()
    still = logprobs.clone().requires_grad_()
    loss(still).backward()
    assert live.grad is not None
    assert still.grad is not None
    assert torch.equal(live.grad, still.grad)


@pytest.mark.parametrize("name", REGIONS)
def test_on_policy_every_region_is_the_plain_policy_gradient(name: str) -> None:
    """At ratio 1 all methods agree: gradient -A."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    loss_of(REGIONS[name], logprobs, logprobs.detach(), advantages).backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx((-advantages).tolist())


def test_gate_fades_on_both_sides_and_gamma_weight_is_largest_between() -> None:
    x = torch.tensor([-3.0, 0.0, 3.0], requires_grad=True)
    soft_gate(x, torch.ones(3)).value.sum().backward()
    assert x.grad is not None
    assert x.grad[0].item() < 0.1
    assert x.grad[2].item() < 1e-5
    logprobs = torch.full((3,), -1.0)
    far = gamma_weight(torch.tensor([-MAX_LOG_RATIO, 0.0, MAX_LOG_RATIO]), logprobs, torch.ones(3))
    assert far.value.tolist() == pytest.approx([0.0, -1.0, 0.0], abs=1e-6)


def test_metrics_of_ratios_add_up_over_parts_and_count_the_sick() -> None:
    x = torch.tensor([0.1, -0.2, math.nan, math.inf, 5.0, math.nan])
    mask = torch.tensor([True, True, True, True, False, False])
    whole = ratio_metrics(x, mask)
    parts = [ratio_metrics(x[:2], mask[:2]), ratio_metrics(x[2:], mask[2:])]
    for key, value in whole.items():
        assert value.item() == pytest.approx(sum(part[key].item() for part in parts))
    assert whole["ratio/tokens"].item() == 2
    assert whole["ratio/nonfinite_tokens"].item() == 2
    assert whole["ratio/abs_log_sum"].item() == pytest.approx(0.3)
    assert whole["ratio/squared_log_sum"].item() == pytest.approx(0.05)
    assert whole["ratio/k3_sum"].item() == pytest.approx(math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8, abs=1e-6)


@pytest.mark.parametrize("name", REGIONS)
def test_no_token_is_no_error(name: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    REGIONS[name](log_ratio(empty, empty), empty, empty).value.sum().backward()
    assert empty.grad is not None
    ids = torch.zeros(0, dtype=torch.int64)
    for level in ("token", "sequence", "sequence_token", "sequence_product"):
        assert at_level(empty, ids, ids.bool(), level).shape == (0,)


floats = st.floats(-4, 4)


@given(st.lists(st.tuples(floats, floats, floats), min_size=1, max_size=12))
def test_clip_is_the_pessimistic_minimum(tokens: list[tuple[float, float, float]]) -> None:
    x, advantages, _ = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    r = x.exp()
    expected = torch.maximum(-r * advantages, -r.clamp(0.8, 1.28) * advantages)
    assert torch.allclose(-advantages * clip(x, advantages, Band.from_offsets(0.2, 0.28)).value, expected)


@given(st.lists(floats, min_size=1, max_size=12), st.sampled_from([1.0, -1.0]))
def test_token_form_of_sequence_ratios_has_the_same_gradient_for_one_advantage(x: list[float], sign: float) -> None:
    ids, mask = torch.arange(len(x)) % 3, torch.ones(len(x), dtype=torch.bool)
    ids = torch.unique(ids, return_inverse=True)[1]
    advantages = torch.full((len(x),), sign, dtype=torch.float64)
    counts = torch.bincount(ids)[ids]
    gradients = []
    for level in ("sequence", "sequence_token"):
        logprobs = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        ratios = at_level(logprobs, ids, mask, level)
        (clip(ratios, advantages, Band.from_offsets(0.2, 0.2)).value / counts).sum().backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad)
    assert torch.allclose(gradients[0], gradients[1])
