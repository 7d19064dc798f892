"""Flat streams and micro-batches. F-13: indices of tokens and states. F-28: masks come from lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import FinishReason, GroupId, Trajectory, Turn
from learner.batching import Layout, MicroBatch, TokenBatch, flatten, micro_batches, plan
from tests.learner_kit import trajectory

LAYOUTS: tuple[Layout, ...] = ("rows", "packed")

FIRST = trajectory(
    [5, 6, 7, 8, 9, 2],
    [0, 0, 1, 1, 0, 1],
    rollout_logprobs=[0, 0, -0.1, -0.7, 0, -0.2],
    versions=[0, 0, 3, 3, 0, 4],
    temperature=0.5,
    turn_rewards=(0.25, 0.0),
    reward=1.0,
    group_id=GroupId(7),
)
SECOND = trajectory([4, 3], [0, 1], rollout_logprobs=-2.0, versions=9, reward=-1.0, group_id=GroupId(8))


def test_flat_streams_hold_the_sampled_tokens_one_trajectory_after_the_other() -> None:
    batch = flatten([FIRST, SECOND], read_final_state=False)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 2, 4, 3]
    assert batch.positions.tolist() == [2, 3, 5, 7]
    assert batch.seq_ids.tolist() == [0, 0, 0, 1]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.1, -0.7, -0.2, -2.0])
    assert batch.weight_versions.tolist() == [3, 3, 4, 9]
    assert batch.temperatures.tolist() == [0.5, 0.5, 0.5, 1.0]
    assert batch.tempered
    assert batch.group_ids.tolist() == [7, 8]
    assert (batch.num_tokens, batch.num_seqs) == (4, 2)


def test_a_turns_reward_is_at_its_last_token_and_the_rest_at_the_last_of_all() -> None:
    batch = flatten([FIRST, SECOND], read_final_state=False)
    assert batch.token_rewards.tolist() == [0.0, 0.25, 0.75, -1.0]
    assert batch.rewards.tolist() == [1.0, -1.0]


def test_the_reward_of_an_empty_turn_goes_to_the_last_sampled_token() -> None:
    empty = Turn(start=6, stop=6, finish_reason=FinishReason.STOP, reward=0.5)
    batch = flatten([dataclasses.replace(FIRST, turns=(*FIRST.turns, empty))], read_final_state=False)
    assert batch.token_rewards.tolist() == [0.0, 0.25, 0.75]


def test_what_the_model_reads_ends_before_the_last_sampled_token_unless_its_state_is_needed() -> None:
    trailing = trajectory([5, 6, 7, 8, 9], [0, 1, 1, 0, 0])
    assert flatten([trailing], read_final_state=False).input_lengths.tolist() == [2]
    assert flatten([trailing], read_final_state=True).input_lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dataclasses.replace(FIRST, reward=None), "unscorable"),
        (dataclasses.replace(FIRST, reward=float("nan")), "unscorable"),
        (trajectory([1, 2], [0, 0]), "no sampled token"),
        (trajectory([1, 2], [1, 0]), "begins with a sampled token"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_refused_by_name(bad: Trajectory, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0.*{message}"):
        flatten([FIRST, bad], read_final_state=False)


def test_rows_are_padded_on_the_right_and_states_stand_before_their_tokens() -> None:
    batch = flatten([SECOND, FIRST], read_final_state=False)
    (micro,) = micro_batches(batch, budget=100, layout="rows")
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9], [4, 0, 0, 0, 0]]
    assert micro.position_ids is None
    assert micro.tokens.tolist() == [1, 2, 3, 0]
    assert micro.states.tolist() == [
        1,
        2,
        4,
        5,
    ]  # the states after 6, 7, 9 and 4, from which 7, 8, 2 and 3 were sampled
    assert micro.seqs.tolist() == [1, 0]
    assert micro.final_states.tolist() == []


def test_packed_trajectories_stand_in_one_row_whose_positions_start_again() -> None:
    batch = flatten([SECOND, FIRST], read_final_state=True)
    (micro,) = micro_batches(batch, budget=100, layout="packed")
    assert micro.input_ids.tolist() == [[5, 6, 7, 8, 9, 2, 4, 3]]
    assert micro.position_ids is not None
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert micro.states.tolist() == [1, 2, 4, 6]
    assert micro.final_states.tolist() == [5, 7]


def test_values_used_are_those_of_the_states_before_the_tokens() -> None:
    """F-13: prompt of 3, response of 4: positions 2, 3, 4, 5."""
    batch = flatten([trajectory([9] * 7, [0, 0, 0, 1, 1, 1, 1])], read_final_state=False)
    (micro,) = micro_batches(batch, budget=100, layout="rows")
    assert micro.states.tolist() == [2, 3, 4, 5]


def test_masks_do_not_depend_on_token_values() -> None:
    """F-28: padding is 0, and so are here the end-of-sequence token, a prompt token and a sampled one."""
    ids = {"[5, 6, 0]": [0, 5, 6, 0], "[7, 0]": [0, 7, 0], "[0]": [0, 0]}
    batch = flatten([trajectory(i, [0] + [1] * (len(i) - 1)) for i in ids.values()], read_final_state=False)
    (micro,) = micro_batches(batch, budget=100, layout="rows")
    assert micro.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.token_ids[batch.positions].tolist() == [5, 6, 0, 7, 0, 0]


def test_rows_stay_within_the_budget_padding_included() -> None:
    assert plan(np.array([2, 9, 3, 8, 2]), budget=20, layout="rows") == [[1, 3], [2, 0, 4]]


def test_packs_stay_within_the_budget_and_fill_gaps() -> None:
    assert plan(np.array([2, 9, 3, 8, 2]), budget=12, layout="packed") == [[1, 2], [3, 0, 4]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trajectory_beyond_the_budget_is_a_micro_batch_of_its_own(layout: Layout) -> None:
    assert plan(np.array([3, 50, 3]), budget=10, layout=layout) == [[1], [0, 2]]


@st.composite
def batches(draw: st.DrawFn) -> TokenBatch:
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).filter(any), min_size=1, max_size=7))
    # Token ids that tell the trajectory and the place.
    made = [trajectory([100 * s + t for t in range(len(m) + 1)], [0, *m]) for s, m in enumerate(masks)]
    return flatten(made, read_final_state=draw(st.booleans()))


def read(micro: MicroBatch, place: int) -> int:
    return int(micro.input_ids.flatten()[place])


@given(batch=batches(), budget=st.integers(1, 40), layout=st.sampled_from(LAYOUTS))
def test_any_cut_reads_every_token_once_from_the_right_state(batch: TokenBatch, budget: int, layout: Layout) -> None:
    micros = micro_batches(batch, budget=budget, layout=layout)
    seen = [int(token) for micro in micros for token in micro.tokens]
    assert sorted(seen) == list(range(batch.num_tokens))
    assert sorted(int(seq) for micro in micros for seq in micro.seqs) == list(range(batch.num_seqs))
    for micro in micros:
        for token, state in zip(micro.tokens.tolist(), micro.states.tolist(), strict=True):
            assert read(micro, state) == int(batch.token_ids[batch.positions[token]]) - 1
        for seq, state in zip(micro.seqs.tolist(), micro.final_states.tolist(), strict=False):
            last = int(batch.positions[batch.seq_ids == seq][-1])
            assert read(micro, state) == int(batch.token_ids[last])
        if len(micro.seqs) > 1:
            assert micro.input_ids.numel() <= budget
