"""Sums over the tokens of a trajectory, or over the members of a group, in flat storage.

`ids` names the segment an element belongs to, 0 to S - 1. Elements of one segment need not be neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def num_segments(ids: Tensor) -> int:
    """Largest id plus one; 0 when there is no element."""
    return int(ids.max()) + 1 if ids.numel() else 0


def segment_sum(values: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of `values` over each segment; differentiable.

    Args:
        values: [N] floating.
        ids: [N] int64.
        mask: [N] bool; elements outside are not read, whatever they hold. None: all count.

    Returns:
        [S]; 0 for a segment without elements.
    """
    if mask is not None:
        values = torch.where(mask, values, 0.0)
    return values.new_zeros(num_segments(ids)).index_add(0, ids, values)


def segment_count(ids: Tensor, mask: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[S], elements of each segment inside `mask` ([N] bool)."""
    return segment_sum(mask.to(dtype), ids)


def segment_mean(values: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """[S], mean of `values` over the elements inside `mask`; 0 for a segment without any; differentiable."""
    return segment_sum(values, ids, mask) / segment_count(ids, mask, values.dtype).clamp(min=1.0)
