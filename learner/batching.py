"""From trajectories to flat streams of sampled tokens, and to micro-batches that a model can read.

Everything outside the model works on the N sampled tokens of a batch, one trajectory after the other. A micro-batch
says which token ids the model reads and where, among its hidden states, the state *before* each sampled token stands.
Masks come from lengths, never from token values: the padding id may be anything, also the end-of-sequence id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.types import Trajectory

Layout = Literal["rows", "packed"]
PADDING_ID = 0  # read by the model, and by nothing that reads the model


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """A batch as flat streams: N sampled tokens, M tokens in all, S trajectories.

    Example: prompt 5 6, sampled 7 8, observation 9, sampled 2; then prompt 4, sampled 3::

        token_ids 5 6 7 8 9 2 4 3      positions 2 3 5 7      seq_ids 0 0 0 1
    """

    token_ids: Tensor  # [M] int64
    starts: NDArray[np.int64]  # [S], index in token_ids of each trajectory's first token
    input_lengths: NDArray[np.int64]  # [S], tokens that the model must read of each
    bounds: NDArray[np.int64]  # [S + 1]; sampled tokens of trajectory s are bounds[s] up to bounds[s + 1]
    positions: Tensor  # [N] int64, index in token_ids of each sampled token
    seq_ids: Tensor  # [N] int64
    turn_ids: Tensor  # [N] int64, counted through the whole batch
    rollout_logprobs: Tensor  # [N] float32, nats
    weight_versions: Tensor  # [N] int64
    temperatures: Tensor  # [N] float32
    tempered: bool  # some temperature is not 1
    token_rewards: Tensor  # [N] float64, at the token that earned them; sums to `rewards` over a trajectory
    rewards: Tensor  # [S] float64, finite
    group_ids: Tensor  # [S] int64
    truncated: Tensor  # [S] bool
    reads_final_state: bool  # input_lengths include the last sampled token

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.rewards.shape[0]

    def last_of_turns(self) -> Tensor:
        """[number of turns] int64, index among the N sampled tokens of each turn's last one."""
        ends = torch.ones_like(self.turn_ids, dtype=torch.bool)
        ends[:-1] = self.turn_ids[1:] != self.turn_ids[:-1]
        return ends.nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a model reads at once. n sampled tokens of k trajectories; the hidden states are [R * W, H]."""

    input_ids: Tensor  # [R, W] int64
    position_ids: Tensor | None  # [R, W] int64, starting again with each packed trajectory; None: one trajectory a row
    tokens: Tensor  # [n] int64, index into the batch's N sampled tokens
    states: Tensor  # [n] int64, index into R * W of the state before each
    seqs: Tensor  # [k] int64, index into the batch's S trajectories
    final_states: Tensor  # [k] int64, index into R * W of the state after the last sampled token; empty if not read


def flatten(
    trajectories: Sequence[Trajectory], *, read_final_state: bool, device: torch.device | str = "cpu"
) -> TokenBatch:
    """Flat streams of `trajectories`, in their order.

    Args:
        trajectories: each with a finite reward and at least one sampled token.
        read_final_state: the state after the last sampled token is needed too (bootstrap at a length stop).

    Raises:
        ValueError: a trajectory cannot be trained on; names the sample.
    """
    for trajectory in trajectories:
        _refuse_untrainable(trajectory)
    lengths = np.array([len(t.token_ids) for t in trajectories], np.int64)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64) if len(lengths) else np.zeros(0, np.int64)
    mask = _join([t.loss_mask for t in trajectories], np.bool_)
    counts = np.array([t.num_sampled for t in trajectories], np.int64)
    last_sampled = np.array([np.flatnonzero(t.loss_mask)[-1] for t in trajectories], np.int64)

    def sampled(name: str, dtype: type[np.generic]) -> Tensor:
        values = _join([getattr(t, name) for t in trajectories], dtype)[mask]
        return torch.from_numpy(values).to(device)

    def per_seq(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    temperatures = np.repeat(np.array([t.temperature for t in trajectories], np.float32), counts)
    return TokenBatch(
        token_ids=torch.from_numpy(_join([t.token_ids for t in trajectories], np.int64)).to(device),
        starts=starts,
        input_lengths=last_sampled + int(read_final_state),
        bounds=np.cumsum([0, *counts], dtype=np.int64),
        positions=torch.from_numpy(np.flatnonzero(mask)).to(device),
        seq_ids=torch.from_numpy(np.repeat(np.arange(len(trajectories)), counts)).to(device),
        turn_ids=torch.from_numpy(_turn_ids(trajectories)).to(device),
        rollout_logprobs=sampled("rollout_logprobs", np.float32),
        weight_versions=sampled("weight_versions", np.int64),
        temperatures=torch.from_numpy(temperatures).to(device),
        tempered=bool((temperatures != 1).any()),
        token_rewards=torch.from_numpy(_join([_token_rewards(t) for t in trajectories], np.float64)[mask]).to(device),
        rewards=per_seq([t.reward or 0.0 for t in trajectories], torch.float64),
        group_ids=per_seq([t.group_id for t in trajectories], torch.int64),
        truncated=per_seq([t.truncated for t in trajectories], torch.bool),
        reads_final_state=read_final_state,
    )


def _refuse_untrainable(trajectory: Trajectory) -> None:
    if trajectory.reward is None or not np.isfinite(trajectory.reward):
        raise ValueError(f"sample {trajectory.sample_id} is unscorable and cannot be trained on")
    if not trajectory.num_sampled:
        raise ValueError(f"sample {trajectory.sample_id} has no sampled token to train on")
    if trajectory.loss_mask[0]:
        raise ValueError(f"sample {trajectory.sample_id} begins with a sampled token: there is no state before it")


def _join(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype)


def _turn_ids(trajectories: Sequence[Trajectory]) -> NDArray[np.int64]:
    """[N]; empty turns are not counted."""
    lengths = [turn.stop - turn.start for t in trajectories for turn in t.turns if turn.stop > turn.start]
    return np.repeat(np.arange(len(lengths)), lengths)


def _token_rewards(trajectory: Trajectory) -> NDArray[np.float64]:
    """[T]; a turn's reward at its last token, the rest of the trajectory's at the last sampled token."""
    assert trajectory.reward is not None
    rewards = np.zeros(len(trajectory.token_ids))
    last, rest = 0, trajectory.reward
    for turn in trajectory.turns:
        if turn.stop > turn.start:  # an empty turn earns nothing of its own: its reward goes to the last token
            rewards[turn.stop - 1] += turn.reward
            rest -= turn.reward
            last = max(last, turn.stop - 1)
    rewards[last] += rest
    return rewards


def plan(input_lengths: NDArray[np.int64], *, budget: int, layout: Layout) -> list[list[int]]:
    """Trajectories of each micro-batch, longest first, so that one that does not fit into memory fails at once.

    rows: rows times the longest stays within the budget. packed: the sum of lengths does. A longer trajectory is a
    micro-batch of its own.
    """
    order = np.argsort(-input_lengths, kind="stable").tolist()
    if layout == "rows":
        return _plan_rows([(seq, int(input_lengths[seq])) for seq in order], budget)
    return _plan_packs([(seq, int(input_lengths[seq])) for seq in order], budget)


def _plan_rows(longest_first: list[tuple[int, int]], budget: int) -> list[list[int]]:
    plans: list[list[int]] = []
    width = 0
    for seq, length in longest_first:
        if plans and (len(plans[-1]) + 1) * width <= budget:
            plans[-1].append(seq)
        else:
            plans.append([seq])
            width = length
    return plans


def _plan_packs(longest_first: list[tuple[int, int]], budget: int) -> list[list[int]]:
    """Each trajectory goes to the first pack with room for it."""
    plans: list[list[int]] = []
    room: list[int] = []
    for seq, length in longest_first:
        place = next((index for index, left in enumerate(room) if length <= left), None)
        if place is None:
            plans.append([seq])
            room.append(budget - length)
        else:
            plans[place].append(seq)
            room[place] -= length
    return plans


def micro_batches(batch: TokenBatch, *, budget: int, layout: Layout) -> list[MicroBatch]:
    """The whole batch cut into micro-batches of about `budget` tokens."""
    return [build(batch, seqs, layout) for seqs in plan(batch.input_lengths, budget=budget, layout=layout)]


def build(batch: TokenBatch, seqs: Sequence[int], layout: Layout) -> MicroBatch:
    """One micro-batch of the trajectories `seqs`."""
    lengths = batch.input_lengths[seqs]
    width = int(lengths.max()) if layout == "rows" else int(lengths.sum())
    # Place of each trajectory's first token among the R * W tokens.
    places = np.arange(len(seqs)) * width if layout == "rows" else np.cumsum(lengths) - lengths
    source = np.concatenate([np.arange(start, start + n) for start, n in zip(batch.starts[seqs], lengths, strict=True)])
    target = np.concatenate([np.arange(place, place + n) for place, n in zip(places, lengths, strict=True)])
    device = batch.token_ids.device

    def on_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    size = len(seqs) * width if layout == "rows" else width
    input_ids = torch.full((size,), PADDING_ID, dtype=torch.int64, device=device)
    input_ids[on_device(target)] = batch.token_ids[on_device(source)]
    position_ids = None
    if layout == "packed":
        position_ids = on_device(np.concatenate([np.arange(n) for n in lengths]))[None]
    tokens = on_device(np.concatenate([np.arange(batch.bounds[s], batch.bounds[s + 1]) for s in seqs]))
    counts = np.diff(batch.bounds)[seqs]
    shift = on_device(np.repeat(places - batch.starts[seqs], counts))
    return MicroBatch(
        input_ids=input_ids.view(-1, width),
        position_ids=position_ids,
        tokens=tokens,
        states=batch.positions[tokens] + shift - 1,
        seqs=on_device(np.asarray(seqs, np.int64)),
        final_states=on_device((places + lengths - 1)[: len(seqs) if batch.reads_final_state else 0]),
    )
