"""Trajectories as Arrow columns: one schema for batches on their way to the learner and for the Parquet archive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from common.errors import WireError
from common.types import FinishReason, GroupId, LeaseId, SampleId, Timings, Trajectory, Turn

TURN = pa.struct(
    [("start", pa.int32()), ("stop", pa.int32()), ("finish_reason", pa.string()), ("reward", pa.float64())]
)
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("lease_id", pa.int64()),
        ("group_id", pa.int64()),
        ("prompt_id", pa.string()),
        ("epoch", pa.int32()),
        ("attempt", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(pa.int32())),
        ("turns", pa.list_(TURN)),
        ("temperature", pa.float64()),
        ("reward", pa.float64()),
        ("finish_reason", pa.string()),
        ("generate_s", pa.float64()),
        ("environment_s", pa.float64()),
        ("score_s", pa.float64()),
        ("metrics", pa.string()),
        ("error", pa.string()),
    ]
)
SCALARS = ("sample_id", "lease_id", "group_id", "prompt_id", "epoch", "attempt", "temperature", "reward", "error")
ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs", "weight_versions")
TIMINGS = ("generate_s", "environment_s", "score_s")


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """One row a trajectory, in the same order."""
    columns: dict[str, Any] = {name: [getattr(t, name) for t in trajectories] for name in SCALARS}
    for name in ARRAYS:
        item = SCHEMA.field(name).type.value_type
        arrays = [getattr(t, name) for t in trajectories]
        offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
        values = pa.array(np.concatenate(arrays) if arrays else [], type=item)
        columns[name] = pa.ListArray.from_arrays(pa.array(offsets), values)
    columns["turns"] = [
        [
            {"start": u.start, "stop": u.stop, "finish_reason": u.finish_reason.value, "reward": u.reward}
            for u in t.turns
        ]
        for t in trajectories
    ]
    columns["finish_reason"] = [t.finish_reason.value for t in trajectories]
    for name in TIMINGS:
        columns[name] = [getattr(t.timings, name) for t in trajectories]
    columns["metrics"] = [json.dumps(dict(t.metrics), sort_keys=True) for t in trajectories]
    return pa.table({field.name: columns[field.name] for field in SCHEMA}, schema=SCHEMA)


def from_table(table: pa.Table) -> list[Trajectory]:
    """Inverse of `to_table`."""
    rows = table.select([name for name in SCHEMA.names if name not in ARRAYS]).to_pylist()
    arrays = {name: _split(table[name]) for name in ARRAYS}
    return [
        Trajectory(
            sample_id=SampleId(row["sample_id"]),
            lease_id=LeaseId(row["lease_id"]),
            group_id=GroupId(row["group_id"]),
            **{name: row[name] for name in ("prompt_id", "epoch", "attempt", "temperature", "reward", "error")},
            **{name: arrays[name][index] for name in ARRAYS},
            turns=tuple(
                Turn(**{**turn, "finish_reason": FinishReason(turn["finish_reason"])}) for turn in row["turns"]
            ),
            finish_reason=FinishReason(row["finish_reason"]),
            timings=Timings(**{name: row[name] for name in TIMINGS}),
            metrics=json.loads(row["metrics"]),
        )
        for index, row in enumerate(rows)
    ]


def to_bytes(table: pa.Table) -> bytes:
    """Arrow stream of a table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def from_bytes(data: bytes) -> pa.Table:
    """Inverse of `to_bytes`.

    Raises:
        WireError: the stream is cut short or is not Arrow. There is no checksum: changed values go unnoticed.
    """
    try:
        return pa.ipc.open_stream(data).read_all()
    except (pa.ArrowException, OSError) as error:
        raise WireError(f"batch of {len(data)} bytes is not a whole Arrow stream: {error}") from None


def _split(column: pa.ChunkedArray) -> list[Any]:
    """Numpy views, one a row."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # a table without rows
        return []
    values = lists.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(lists.value_lengths().to_numpy(zero_copy_only=False))
    return [values[end - length : end] for end, length in zip(ends, lists.value_lengths().to_pylist(), strict=True)]
