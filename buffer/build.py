"""A `ReplayBuffer` from the run's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from buffer.archive import TrajectoryArchive
from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer, ReplaySettings
from buffer.sources import load_rows
from buffer.store import SampleStore, trajectory_bytes
from common.config import RunConfig

LEAST_LOST_IN_A_ROW = 64  # units, before a run counts as broken


def replay_settings(config: RunConfig) -> ReplaySettings:
    """The buffer's part of the config."""
    buffer, groups, staleness = config.buffer, config.groups, config.staleness
    # Bad prompts fail at once and the next ones take their place, until good ones fill the admission limit. With that
    # many lost before the first generation ends, more than half of the prompts are bad.
    most_live_units = (staleness.bound + 1) * buffer.batch_size // groups.size
    return ReplaySettings(
        seed=config.seed,
        batch_size=buffer.batch_size,
        group_size=groups.size,
        staleness_bound=staleness.bound,
        on_exceeded=staleness.on_exceeded,
        straggler=groups.straggler,
        straggler_after_s=groups.straggler_after_s,
        close_at=groups.close_at,
        max_attempts=buffer.max_attempts,
        lease_deadline_s=buffer.lease_deadline_s,
        heartbeat_s=buffer.heartbeat_s,
        max_bytes=buffer.max_mib * 2**20,
        longest_trajectory_bytes=trajectory_bytes(config.rollout.max_tokens),
        max_no_update_in_a_row=buffer.max_no_update_in_a_row,
        max_lost_in_a_row=max(LEAST_LOST_IN_A_ROW, most_live_units),
    )


def build_buffer(
    config: RunConfig,
    *,
    clock: Callable[[], float],
    store: SampleStore | None = None,
    archive: TrajectoryArchive | None = None,
    state: Mapping[str, Any] | None = None,
) -> ReplayBuffer:
    """A buffer over the run's training prompts.

    Args:
        store: None: in memory.
        archive: keeps what was trained on or dropped.
        state: of an earlier buffer, from a checkpoint; none for a new run.

    Raises:
        DataError: the data set is missing, empty or malformed.
        ConfigError: one batch does not fit the byte limit, or the run was started with another group size.
    """
    rows = load_rows(
        config.data, seed=config.seed, split="train", evaluation=config.evaluation, import_dir=config.import_dir
    )
    prompts = PromptSource(rows, seed=config.seed, epochs=config.data.epochs)
    return ReplayBuffer(replay_settings(config), prompts, clock, store, state=state, archive=archive)
