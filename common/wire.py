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
        "turns": [[turn.start, turn.stop, turn.finish_reason.value, turn.reward] for turn in trajectory.turns],
        "temperature": trajectory.temperature,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason.value,
        "timings": [trajectory.timings.generate_s, trajectory.timings.environment_s, trajectory.timings.score_s],
        "metrics": dict(trajectory.metrics),
        "error": trajectory.error,
    }
    for name, dtype in ARRAYS.items():
        fields[name] = np.ascontiguousarray(getattr(trajectory, name), dtype=dtype).tobytes()
    payload = msgpack.packb(fields)
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
        sample_id=SampleId(_int(fields, "sample_id")),
        lease_id=LeaseId(_int(fields, "lease_id")),
        group_id=GroupId(_int(fields, "group_id")),
        prompt_id=_text(fields, "prompt_id"),
        epoch=_int(fields, "epoch"),
        attempt=_int(fields, "attempt"),
        token_ids=_array(fields, "token_ids"),
        loss_mask=_array(fields, "loss_mask"),
        rollout_logprobs=_array(fields, "rollout_logprobs"),
        weight_versions=_array(fields, "weight_versions"),
        turns=tuple(
            Turn(start=int(start), stop=int(stop), finish_reason=FinishReason(reason), reward=float(reward))
            for start, stop, reason, reward in fields["turns"]
        ),
        temperature=float(fields["temperature"]),
        reward=None if fields["reward"] is None else float(fields["reward"]),
        finish_reason=FinishReason(fields["finish_reason"]),
        timings=Timings(**dict(zip(("generate_s", "environment_s", "score_s"), map(float, fields["timings"]), strict=True))),
        metrics={str(name): float(value) for name, value in fields["metrics"].items()},
        error=_text(fields, "error"),
    )


def _int(fields: Mapping[str, Any], name: str) -> int:
    value = fields[name]
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if type(value) is not str:
        raise TypeError(f"{name} must be text, not {value!r}")
    return value


def _array(fields: Mapping[str, Any], name: str) -> NDArray[Any]:
    value = fields[name]
    if type(value) is not bytes:
        raise TypeError(f"{name} must be bytes, not {type(value).__name__}")
    if name == "loss_mask" and value.strip(b"\x00\x01"):
        raise ValueError("loss_mask holds bytes other than 0 and 1")
    return np.frombuffer(value, dtype=ARRAYS[name])
