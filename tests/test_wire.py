"""A trajectory survives the wire unchanged; whatever else arrives is a `WireError` and nothing worse."""

from __future__ import annotations

import contextlib
import math
import zlib
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import WireError
from common.types import Trajectory
from common.wire import HEADER, MAGIC, SCHEMA, decode, encode
from tests.trajectories import assert_same, make_rollout, make_trajectory, trajectories

FIELDS = sorted(msgpack.unpackb(encode(make_trajectory())[HEADER.size :]))


def message(fields: Any) -> bytes:
    """A message with a right header and checksum around any payload."""
    payload = msgpack.packb(fields)
    return HEADER.pack(MAGIC, SCHEMA, zlib.crc32(payload)) + payload


def with_field(name: str, value: Any) -> bytes:
    return message({**msgpack.unpackb(encode(make_trajectory())[HEADER.size :]), name: value})


@given(trajectories())
def test_decode_is_the_inverse_of_encode(trajectory: Trajectory) -> None:
    assert_same(decode(encode(trajectory)), trajectory)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_reward_that_is_not_finite_arrives_as_it_is(reward: float) -> None:
    received = decode(encode(make_trajectory(reward=reward))).reward
    assert received == reward or (math.isnan(reward) and received is not None and math.isnan(received))


def test_numpy_scalars_of_a_reward_function_can_be_sent() -> None:
    trajectory = make_trajectory(reward=np.float32(0.5), metrics={"hits": np.int64(3)})
    received = decode(encode(trajectory))
    assert (received.reward, received.metrics) == (0.5, {"hits": 3.0})


def test_text_that_is_not_unicode_can_be_sent() -> None:
    """F-30: an error message may quote a lone surrogate, which UTF-8 cannot hold."""
    assert decode(encode(make_trajectory(error="bad row \ud800!"))).error == "bad row \\ud800!"


def test_arrays_have_no_memory_of_a_strided_source() -> None:
    trajectory = make_rollout([1, 2], [3, 4])
    strided = make_rollout([1, 2], [3, 4], token_ids=np.array([1, 0, 2, 0, 3, 0, 4, 0], np.int32)[::2])
    assert encode(strided) == encode(trajectory)


@given(data=st.data())
def test_any_flipped_byte_is_a_wire_error(data: st.DataObject) -> None:
    whole = encode(data.draw(trajectories()))
    broken = bytearray(whole)
    broken[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        decode(bytes(broken))


def test_every_truncation_is_a_wire_error() -> None:
    whole = encode(make_trajectory())
    for length in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:length])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(st.binary(max_size=100))
def test_foreign_payload_under_a_right_checksum_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode(HEADER.pack(MAGIC, SCHEMA, zlib.crc32(payload)) + payload)


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(name=st.sampled_from(FIELDS), value=JSONISH)
def test_any_value_in_any_field_is_a_trajectory_or_a_wire_error(name: str, value: Any) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(with_field(name, value)), Trajectory)


@given(turn=st.lists(JSONISH, max_size=5))
def test_any_turn_is_a_trajectory_or_a_wire_error(turn: list[Any]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode(with_field("turns", [turn])), Trajectory)


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_named(name: str) -> None:
    fields = msgpack.unpackb(encode(make_trajectory())[HEADER.size :])
    del fields[name]
    with pytest.raises(WireError, match=f"lacks the field '{name}'"):
        decode(message(fields))


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("sample_id", "7", "sample_id must be an integer"),
        ("sample_id", True, "sample_id must be an integer"),
        ("epoch", 2**31, "epoch must be an integer"),
        ("sample_id", 2**63, "sample_id must be an integer"),
        ("prompt_id", 7, "prompt_id must be text"),
        ("token_ids", [1, 2], "token_ids must be bytes"),
        ("token_ids", b"\0" * 23, "malformed"),
        ("token_ids", b"\0" * 20, "must share one shape"),
        ("loss_mask", b"\0\0\2\1\0\1", "other than 0 and 1"),
        ("loss_mask", b"\0\0\0\0\0\0", "weight_versions"),
        ("rollout_logprobs", np.array([0, 0, np.nan, -1, 0, -1], "<f4").tobytes(), "must be finite"),
        ("temperature", 0.0, "must be above 0"),
        ("temperature", math.nan, "must be above 0"),
        ("reward", "1", "reward must be a number"),
        ("finish_reason", "because", "because"),
        ("turns", [[2, 4, "stop", 0.0]], "turns must cover"),
        ("turns", [[2.5, 4, "stop", 0.0], [5, 6, "stop", 0.0]], "integer"),
        ("turns", [[2, math.inf, "stop", 0.0]], "integer"),
        ("timings", [1.0, 2.0], "malformed"),
        ("metrics", {"solved": "yes"}, "solved must be a number"),
        ("metrics", [1], "malformed"),
    ],
)
def test_malformed_field_is_named(name: str, value: Any, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(with_field(name, value))


def test_other_schema_says_which_one_is_read() -> None:
    whole = encode(make_trajectory())
    other = HEADER.pack(MAGIC, SCHEMA + 1, HEADER.unpack_from(whole)[2]) + whole[HEADER.size :]
    with pytest.raises(WireError, match=f"has schema {SCHEMA + 1}; this version reads {SCHEMA}"):
        decode(other)
