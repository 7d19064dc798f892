"""Trajectories for tests: one written out by hand, and a hypothesis strategy for any valid one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from common.types import FinishReason, GroupId, LeaseId, SampleId, Timings, Trajectory, Turn

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(0, 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # UTF-8 has no lone surrogates
FINISH = st.sampled_from(FinishReason)


def make_trajectory(sample_id: int = 7, **changes: Any) -> Trajectory:
    """The example of `Trajectory`'s docstring: prompt 5 6, sampled 7 8, observation 9, sampled 2."""
    fields: dict[str, Any] = {
        "sample_id": SampleId(sample_id),
        "lease_id": LeaseId(70),
        "group_id": GroupId(700),
        "prompt_id": "sort-digits/17",
        "epoch": 1,
        "attempt": 0,
        "token_ids": np.array([5, 6, 7, 8, 9, 2], np.int32),
        "loss_mask": np.array([False, False, True, True, False, True]),
        "rollout_logprobs": np.array([0, 0, -0.1, -0.7, 0, -0.2], np.float32),
        "weight_versions": np.array([-1, -1, 3, 3, -1, 4], np.int32),
        "turns": (
            Turn(start=2, stop=4, finish_reason=FinishReason.STOP, reward=0.25),
            Turn(start=5, stop=6, finish_reason=FinishReason.LENGTH),
        ),
        "temperature": 0.9,
        "reward": 0.5,
        "finish_reason": FinishReason.LENGTH,
        "timings": Timings(generate_s=1.5, environment_s=0.25, score_s=0.125),
        "metrics": {"solved": 1.0},
    }
    return Trajectory(**{**fields, **changes})


def make_rollout(prompt: list[int], sampled: list[int], version: int = 0, **changes: Any) -> Trajectory:
    """One turn: `sampled` after `prompt`, all under one weight version."""
    total, start = len(prompt) + len(sampled), len(prompt)
    mask = np.arange(total) >= start
    return make_trajectory(
        **{
            "token_ids": np.array([*prompt, *sampled], np.int32),
            "loss_mask": mask,
            "rollout_logprobs": np.where(mask, np.float32(-0.5), np.float32(0)),
            "weight_versions": np.where(mask, np.int32(version), np.int32(-1)),
            "turns": (Turn(start=start, stop=total, finish_reason=FinishReason.STOP),) if sampled else (),
            "finish_reason": FinishReason.STOP,
            **changes,
        }
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any valid trajectory: several turns, empty ones, no tokens at all, unscorable ones."""
    spans = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4))  # (given, sampled) tokens
    mask: list[bool] = []
    turns = []
    for given_tokens, sampled in spans:
        start = len(mask) + given_tokens
        mask += [False] * given_tokens + [True] * sampled
        reward = draw(FLOAT)
        turns.append(Turn(start=start, stop=start + sampled, finish_reason=draw(FINISH), reward=reward))
    mask += [False] * draw(st.integers(0, 3))
    total = len(mask)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=total, max_size=total))
    versions = draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total))
    loss_mask = np.array(mask, np.bool_)
    return Trajectory(
        sample_id=SampleId(draw(INT64)),
        lease_id=LeaseId(draw(INT64)),
        group_id=GroupId(draw(INT64)),
        prompt_id=draw(TEXT),
        epoch=draw(st.integers(0, 2**31 - 1)),
        attempt=draw(st.integers(0, 100)),
        token_ids=np.array(draw(st.lists(INT32, min_size=total, max_size=total)), np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, np.array(logprobs, np.float32), np.float32(0)),
        weight_versions=np.where(loss_mask, np.array(versions, np.int32), np.int32(-1)),
        turns=tuple(turns),
        temperature=draw(st.floats(0.01, 10)),
        reward=draw(st.none() | FLOAT),
        finish_reason=draw(FINISH),
        timings=Timings(generate_s=draw(FLOAT), environment_s=draw(FLOAT), score_s=draw(FLOAT)),
        metrics=draw(st.dictionaries(TEXT, FLOAT, max_size=3)),
        error=draw(TEXT),
    )


def assert_same(left: Trajectory, right: Trajectory) -> None:
    """Every field equal, arrays in value and dtype."""
    for name in Trajectory.__dataclass_fields__:
        ours, theirs = getattr(left, name), getattr(right, name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        else:
            assert ours == theirs, name
            assert type(ours) is type(theirs), name
