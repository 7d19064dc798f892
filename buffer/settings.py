"""What the replay buffer is told by the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError

OnExceeded = Literal["mask", "drop", "wait"]
Straggler = Literal["retry", "close", "convert"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Limits and rules of one run. Ranges, and what goes together, are checked by common/config.py.

    Raises:
        ConfigError: one batch does not fit the byte limit.
    """

    seed: int
    batch_size: int  # trajectories, a multiple of group_size
    group_size: int = 1
    staleness_bound: int = 4  # weight versions; 0: synchronous training
    on_exceeded: OnExceeded = "mask"
    straggler: Straggler = "retry"
    close_at: int | None = None  # usable members that are enough to close or convert a group
    straggler_after_s: float = 300.0  # since the first usable delivery of the group
    max_attempts: int = 3
    lease_deadline_s: float = 600.0
    heartbeat_s: float = 30.0
    max_bytes: int = 1 << 30  # of held trajectories
    longest_trajectory_bytes: int = 1 << 16  # see store.trajectory_bytes
    max_no_update_in_a_row: int = 5
    max_lost_in_a_row: int = 64  # units lost one after the other, with no usable trajectory in between

    def __post_init__(self) -> None:
        one_batch = self.batch_size * self.longest_trajectory_bytes
        if self.max_bytes < one_batch:
            raise ConfigError(
                f"buffer.max_mib = {self.max_bytes / 2**20:g} cannot hold one batch of {self.batch_size} trajectories "
                f"of the greatest length ({one_batch / 2**20:.1f} MiB): raise it, or lower buffer.batch_size or "
                "rollout.max_tokens"
            )

    @property
    def units_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def admission_limit(self) -> int:
        """Most samples that may be live at once: (η + 1) · B."""
        return (self.staleness_bound + 1) * self.batch_size
