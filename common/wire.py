"""msgpack codec of a trajectory: raw little-endian arrays, a schema number and a checksum. No pickle.

Layout: `b"SLIP"`, schema number (uint16), CRC-32 of the payload (uint32), payload (msgpack map of the fields).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import WireError
from common.types import FinishReason, GroupId, LeaseId, SampleId, Timings, Trajectory, Turn

MAGIC = b"SLIP"
SCHEMA = 1
HEADER = struct.Struct("<4sHI")
ARRAYS = {"token_ids": "<i4", "loss_mask": "|b1", "rollout_logprobs": "<f4", "weight_versions": "<i4"}


def encode(trajectory: Trajectory) -> bytes:
    """Bytes of a trajectory. Inverse of `decode`."""
    fields: dict[str, Any] = {
        "sample_id": trajectory.sample_id,
        "lease_id": trajectory.lease_id,
        "group_id": trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "epoch": trajectory.epoch,
        "attempt": trajectory.attempt,
        "turns": [[turn.start, turn.stop, turn.finish_reason.value, float(turn.reward)] for turn in trajectory.turns],
        "temperature": trajectory.temperature,
        "reward": None if trajectory.reward is None else float(trajectory.reward),  # may be a numpy scalar
        "finish_reason": trajectory.finish_reason.value,
        "timings": [trajectory.timings.generate_s, trajectory.timings.environment_s, trajectory.timings.score_s],
        "metrics": {name: float(value) for name, value in trajectory.metrics.items()},
        "error": trajectory.error,
    }
    for name, dtype in ARRAYS.items():
        fields[name] = np.ascontiguousarray(getattr(trajectory, name), dtype=dtype).tobytes()
    # backslashreplace: an error message may quote a lone surrogate, which UTF-8 cannot hold
    payload: bytes = msgpack.packb(fields, unicode_errors="backslashreplace")
    return HEADER.pack(MAGIC, SCHEMA, zlib.crc32(payload)) + payload


def decode(data: bytes) -> Trajectory:
    """The trajectory in `data`.

    Raises:
        WireError: anything is malformed; the message names what.
    """
    if len(data) < HEADER.size:
        raise WireError(f"trajectory message of {len(data)} bytes is shorter than its header")
    magic, schema, checksum = HEADER.unpack_from(data)
    payload = data[HEADER.size :]
    if magic != MAGIC:
        raise WireError(f"trajectory message starts with {magic!r}, not {MAGIC!r}")
    if schema != SCHEMA:
        raise WireError(f"trajectory message has schema {schema}; this version reads {SCHEMA}")
    if zlib.crc32(payload) != checksum:
        raise WireError("trajectory message fails its checksum")
    try:
        fields = msgpack.unpackb(payload)
    except Exception as error:  # msgpack raises many kinds, all of which mean the same here
        raise WireError(f"trajectory message is not msgpack: {error}") from None
    if not isinstance(fields, dict):
        raise WireError("trajectory message is not a map of fields")
    try:
        return _build(fields)
    except KeyError as error:
        raise WireError(f"trajectory message lacks the field {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise WireError(f"trajectory message is malformed: {error}") from None


def _build(fields: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        sample_id=SampleId(_int("sample_id", fields["sample_id"], bits=64)),
        lease_id=LeaseId(_int("lease_id", fields["lease_id"], bits=64)),
        group_id=GroupId(_int("group_id", fields["group_id"], bits=64)),
        prompt_id=_text("prompt_id", fields["prompt_id"]),
        epoch=_int("epoch", fields["epoch"]),
        attempt=_int("attempt", fields["attempt"]),
        token_ids=_array("token_ids", fields["token_ids"]),
        loss_mask=_array("loss_mask", fields["loss_mask"]),
        rollout_logprobs=_array("rollout_logprobs", fields["rollout_logprobs"]),
        weight_versions=_array("weight_versions", fields["weight_versions"]),
        turns=tuple(_turn(*turn) for turn in fields["turns"]),
        temperature=_number("temperature", fields["temperature"]),
        reward=None if fields["reward"] is None else _number("reward", fields["reward"]),
        finish_reason=FinishReason(fields["finish_reason"]),
        timings=_timings(*fields["timings"]),
        metrics={_text("a metric's name", name): _number(name, value) for name, value in fields["metrics"].items()},
        error=_text("error", fields["error"]),
    )


def _turn(start: Any, stop: Any, finish_reason: Any, reward: Any) -> Turn:
    return Turn(
        start=_int("turn start", start),
        stop=_int("turn stop", stop),
        finish_reason=FinishReason(finish_reason),
        reward=_number("turn reward", reward),
    )


def _timings(generate_s: Any, environment_s: Any, score_s: Any) -> Timings:
    return Timings(
        generate_s=_number("generate_s", generate_s),
        environment_s=_number("environment_s", environment_s),
        score_s=_number("score_s", score_s),
    )


def _int(name: str, value: Any, bits: int = 32) -> int:
    """`value`, which must fit a signed integer of `bits`, as in the Arrow columns."""
    if type(value) is not int or not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise TypeError(f"{name} must be an integer of {bits} bits, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{name} must be text, not {value!r}")
    return value


def _array(name: str, value: Any) -> NDArray[Any]:
    if type(value) is not bytes:
        raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
    if name == "loss_mask" and value.strip(b"\x00\x01"):
        raise ValueError("loss_mask holds bytes other than 0 and 1")
    return np.frombuffer(value, dtype=ARRAYS[name])
