"""Trajectories survive Arrow unchanged, in order, whatever their number and lengths."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.columns import SCHEMA, from_bytes, from_table, to_bytes, to_table
from common.errors import WireError
from common.types import Trajectory
from tests.trajectories import assert_same, make_rollout, make_trajectory, trajectories


@given(st.lists(trajectories(), max_size=5))
def test_rows_come_back_equal_and_in_order(batch: list[Trajectory]) -> None:
    rows = from_table(from_bytes(to_bytes(to_table(batch))))
    assert len(rows) == len(batch)
    for row, trajectory in zip(rows, batch, strict=True):
        assert_same(row, trajectory)


def test_no_rows_keep_the_schema() -> None:
    table = to_table([])
    assert table.schema == SCHEMA
    assert from_table(from_bytes(to_bytes(table))) == []


def test_rows_of_joined_and_sliced_tables_keep_their_own_tokens() -> None:
    first, second, third = (make_rollout([n], [n, n + 1][: n % 2 + 1], sample_id=n) for n in (1, 2, 3))
    joined = pa.concat_tables([to_table([first, second]), to_table([third])])
    for row, trajectory in zip(from_table(joined), (first, second, third), strict=True):
        assert_same(row, trajectory)
    for row, trajectory in zip(from_table(joined.slice(1)), (second, third), strict=True):
        assert_same(row, trajectory)
    assert from_table(joined.slice(0, 0)) == []


def test_column_values_are_those_of_the_docstring_example() -> None:
    row = to_table([make_trajectory()]).to_pylist()[0]
    assert row["token_ids"] == [5, 6, 7, 8, 9, 2]
    assert row["loss_mask"] == [False, False, True, True, False, True]
    assert row["weight_versions"] == [-1, -1, 3, 3, -1, 4]
    assert row["turns"] == [
        {"start": 2, "stop": 4, "finish_reason": "stop", "reward": 0.25},
        {"start": 5, "stop": 6, "finish_reason": "length", "reward": 0.0},
    ]
    assert (row["generate_s"], row["environment_s"], row["score_s"]) == (1.5, 0.25, 0.125)
    assert row["metrics"] == '{"solved": 1.0}'


def test_unscorable_is_null_and_not_nan() -> None:
    table = to_table([make_trajectory(reward=None, error="timeout"), make_trajectory(reward=math.nan)])
    assert table["reward"].null_count == 1
    unscorable, not_a_number = from_table(table)
    assert unscorable.reward is None
    assert unscorable.error == "timeout"
    assert not_a_number.reward is not None
    assert math.isnan(not_a_number.reward)


def test_column_types_do_not_depend_on_the_rows() -> None:
    for batch in ([], [make_trajectory()], [make_rollout([], [], reward=None, metrics={})]):
        assert to_table(batch).schema == SCHEMA


def test_masks_can_select_tokens() -> None:
    row = from_table(to_table([make_trajectory()]))[0]
    assert row.loss_mask.dtype == np.bool_
    np.testing.assert_array_equal(row.token_ids[row.loss_mask], [7, 8, 2])


def test_truncated_stream_is_a_wire_error() -> None:
    whole = to_bytes(to_table([make_trajectory()]))
    for length in (0, 3, 100, len(whole) // 2):
        with pytest.raises(WireError, match="Arrow"):
            from_bytes(whole[:length])
