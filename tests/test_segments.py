"""Sums and means over segments that need not be neighbours and may be empty."""

from __future__ import annotations

import math

import torch

from learner.segments import num_segments, segment_count, segment_mean, segment_sum

IDS = torch.tensor([2, 0, 2, 0])
MASK = torch.tensor([True, False, True, False])
VALUES = torch.tensor([1.0, math.nan, 4.0, math.inf])


def test_masked_elements_are_not_read_and_empty_segments_are_zero() -> None:
    assert num_segments(IDS) == 3
    assert segment_sum(VALUES, IDS, MASK).tolist() == [0.0, 0.0, 5.0]
    assert segment_mean(VALUES, IDS, MASK).tolist() == [0.0, 0.0, 2.5]
    assert segment_count(IDS, MASK).tolist() == [0.0, 0.0, 2.0]


def test_masked_elements_get_no_gradient() -> None:
    values = VALUES.clone().requires_grad_()
    segment_mean(values, IDS, MASK).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_no_element_means_no_segment() -> None:
    nothing = torch.zeros(0)
    assert segment_sum(nothing, IDS[:0]).shape == segment_mean(nothing, IDS[:0], MASK[:0]).shape == (0,)
