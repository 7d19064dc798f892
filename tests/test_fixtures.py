"""Every number of fixtures/algorithms_fixtures.json, computed again by the product.

The numbers were made independently of this code, in float64; gradients by numeric differentiation. A key is reproduced,
or recorded as a mistake that the product must not repeat, or outside the product; one that is none of these fails.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.fixtures import estimators, losses, recipes  # noqa: F401 they register their cases
from tests.fixtures.support import FIXTURES, MISTAKES, REPRODUCERS, Case, flat

OUTSIDE = {
    "DIS.edge_ratio_repr": "a tie at the open bound: only rounding decides, so nothing may rest on it",
    "GAC.cos": "the thresholds of gradient alignment are unpublished: not offered",
    "GAC.full_projection": "as GAC.cos",
    "KL.exact(pi||ref)": "premise of the KL cases, used there",
    "KL.true_grad_z": "premise of the KL cases, used there",
}


@cache
def reproduced(dtype: torch.dtype) -> dict[str, Any]:
    return collect(REPRODUCERS, dtype)


@cache
def mistakes() -> dict[str, Any]:
    return collect(MISTAKES, torch.float64)


def collect(cases: list[Case], dtype: torch.dtype) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for case in cases:
        new = case(lambda numbers: torch.tensor(numbers, dtype=dtype))
        assert not results.keys() & new.keys()
        results |= new
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("key", sorted(FIXTURES.keys() - OUTSIDE.keys() - mistakes().keys()))
def test_number_is_reproduced(key: str, dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float64 else 1e-5
    assert flat(reproduced(dtype)[key]) == pytest.approx(flat(FIXTURES[key]), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("key", sorted(mistakes()))
def test_recorded_mistake_is_not_repeated(key: str) -> None:
    assert flat(mistakes()[key]) != pytest.approx(flat(FIXTURES[key]), rel=1e-3, abs=1e-3)


def test_every_key_is_in_exactly_one_list() -> None:
    named = [*reproduced(torch.float64), *mistakes(), *OUTSIDE]
    assert len(named) == len(set(named))
    assert set(named) == FIXTURES.keys()
