"""Bounds that move: with the token's probability, its staleness, and the balance of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from learner.bounds import balanced_band, gradient_contributions, linear_offsets, probability_band, table_offsets
from learner.importance import Band, clip

LOWS, HIGHS = [0.2, 0.4, 0.6, 0.8, 0.9, 0.95], [1.2, 1.5, 2.0]
RATIOS = torch.tensor([1.1, 1.5, 0.3, 0.9], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
ALL = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("target", "expected", "reached"),
    [(0.5, (0.2, 1.2), 1.1 / 1.2), (1.0, (0.4, 1.2), 1.1 / 0.9), (1.3, (0.95, 1.2), math.inf)],
)
def test_search_raises_the_lower_bound_until_gradients_balance(
    target: float, expected: tuple[float, float], reached: float
) -> None:
    positive, negative = gradient_contributions(RATIOS.log(), ADVANTAGES, ALL, LOWS, HIGHS)
    low, high = balanced_band(positive, negative, LOWS, HIGHS, target)
    assert (low, high) == expected
    gain, loss = positive[HIGHS.index(high)].item(), negative[LOWS.index(low)].item()
    assert (gain / loss if loss else math.inf) == pytest.approx(reached)


def test_search_raises_the_upper_bound_only_after_the_lower() -> None:
    positive, negative = gradient_contributions(RATIOS.log(), ADVANTAGES, ALL, LOWS[:5], HIGHS)
    assert balanced_band(positive, negative, LOWS[:5], HIGHS, 2.0) == (0.9, 1.5)  # 2.6 / 0.9
    assert balanced_band(positive, negative, LOWS[:5], HIGHS, 99.0) == (0.9, 2.0)


def test_contributions_are_those_of_tokens_the_clip_leaves_a_gradient() -> None:
    positive, negative = gradient_contributions(RATIOS.log(), ADVANTAGES, ALL, [0.6], [1.2])
    x = RATIOS.log().requires_grad_()
    (ADVANTAGES * clip(x, ADVANTAGES, Band.from_ratios(0.6, 1.2)).value).sum().backward()
    assert x.grad is not None
    assert positive.item() == pytest.approx(x.grad.clamp(min=0).sum().item())
    assert negative.item() == pytest.approx(-x.grad.clamp(max=0).sum().item())


def test_contributions_add_up_over_parts_and_do_not_read_masked_tokens() -> None:
    x = torch.tensor([0.1, math.nan, -0.5, math.inf, 0.2])
    advantages, mask = torch.tensor([1.0, math.nan, -2.0, 1.0, 0.5]), torch.tensor([True, False, True, True, True])
    whole = torch.cat(gradient_contributions(x, advantages, mask, LOWS, HIGHS))
    parts = sum(
        torch.cat(gradient_contributions(x[i], advantages[i], mask[i], LOWS, HIGHS)) for i in (slice(3), slice(3, 5))
    )
    assert torch.allclose(whole, torch.as_tensor(parts))
    assert torch.isfinite(whole).all()
    without = torch.tensor([True, False, True, False, True])  # nor the token of infinite ratio
    assert torch.equal(whole, torch.cat(gradient_contributions(x, advantages, without, LOWS, HIGHS)))


def test_offset_tightens_in_a_line_with_staleness() -> None:
    offsets = linear_offsets(torch.tensor([0, 1, 2, 4, 9]), fresh=5.0, stale=1.0, bound=4)
    assert offsets.tolist() == [5.0, 4.0, 3.0, 1.0, 1.0]
    assert linear_offsets(torch.tensor([0, 1, 7]), fresh=5.0, stale=1.0, bound=0).tolist() == [5.0, 1.0, 1.0]


def test_offset_from_a_table_repeats_its_last_entry() -> None:
    assert table_offsets(torch.tensor([0, 1, 2, 9]), [0.5, 0.3]).tolist() == pytest.approx([0.5, 0.3, 0.3, 0.3])


def test_staler_tokens_meet_a_narrower_band() -> None:
    staleness = torch.tensor([0, 4])
    band = Band.from_offsets(0.3, linear_offsets(staleness, fresh=5.0, stale=0.5, bound=4))
    assert band.contains(torch.tensor([2.0, 2.0]).log(), closed=False).tolist() == [True, False]


def test_rare_tokens_may_change_by_more() -> None:
    band = probability_band(torch.tensor([0.9, 0.5, 0.1, 1e-9]).log())
    highs = torch.as_tensor(band.log_high).exp()
    assert (highs.diff() > 0).all()
    assert highs[3].item() == pytest.approx(10.0)
    assert torch.as_tensor(band.log_low).exp()[1:].tolist() == pytest.approx([0.5, 0.5, 0.5])
