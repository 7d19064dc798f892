"""A `ReplayBuffer` from the run's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from buffer.archive import TrajectoryArchive
from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer, ReplaySettings
from buffer.sources import load_rows
from common.config import RunConfig

BYTES_PER_TOKEN = 13  # int32 id, bool mask, float32 log-prob, int32 version
BYTES_PER_TRAJECTORY = 2048  # everything that does not grow with the tokens


def replay_settings(config: RunConfig) -> ReplaySettings:
    """The buffer's part of the config."""
    buffer, groups, staleness = config.buffer, config.groups, config.staleness
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
        longest_trajectory_bytes=config.rollout.max_tokens * BYTES_PER_TOKEN + BYTES_PER_TRAJECTORY,
        max_no_update_in_a_row=buffer.max_no_update_in_a_row,
    )


def build_buffer(
    config: RunConfig,
    *,
    clock: Callable[[], float],
    archive: TrajectoryArchive | None = None,
    state: Mapping[str, Any] | None = None,
) -> ReplayBuffer:
    """A buffer over the run's training prompts.

    Args:
        archive: keeps what was trained on or dropped.
        state: of an earlier buffer, from a checkpoint; none for a new run.

    Raises:
        DataError: the data set is missing, empty or malformed.
        ConfigError: a setting of the buffer cannot work.
    """
    rows = load_rows(
        config.data, seed=config.seed, split="train", evaluation=config.evaluation, import_dir=config.import_dir
    )
    prompts = PromptSource(rows, seed=config.seed, epochs=config.data.epochs)
    return ReplayBuffer(replay_settings(config), prompts, clock, state=state, archive=archive)
