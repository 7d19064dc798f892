"""What the replay buffer is told by the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import ConfigError

OnExceeded = Literal["mask", "drop", "wait"]
Straggler = Literal["retry", "close", "convert"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Limits and rules of one run.

    Raises:
        ConfigError: a value is out of range, or two cannot work together; the message names the dotted key.
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
    max_lost_in_a_row: int = 64  # samples that end without a usable trajectory, one after the other

    def __post_init__(self) -> None:
        for key, value, least in (
            ("seed", self.seed, 0),
            ("buffer.batch_size", self.batch_size, 1),
            ("groups.size", self.group_size, 1),
            ("staleness.bound", self.staleness_bound, 0),
            ("buffer.max_attempts", self.max_attempts, 1),
            ("rollout.max_tokens", self.longest_trajectory_bytes, 1),
            ("buffer.max_no_update_in_a_row", self.max_no_update_in_a_row, 1),
            ("buffer.max_lost_in_a_row", self.max_lost_in_a_row, 1),
        ):
            if value < least:
                raise ConfigError(f"{key} = {value}: must be at least {least}")
        for key, limit_s in (
            ("groups.straggler_after_s", self.straggler_after_s),
            ("buffer.heartbeat_s", self.heartbeat_s),
            ("buffer.lease_deadline_s", self.lease_deadline_s),
        ):
            if not limit_s > 0:
                raise ConfigError(f"{key} = {limit_s}: must be above 0 seconds")
        if self.on_exceeded not in ("mask", "drop", "wait"):
            raise ConfigError(f"staleness.on_exceeded = {self.on_exceeded!r}: choose mask, drop or wait")
        if self.straggler not in ("retry", "close", "convert"):
            raise ConfigError(f"groups.straggler = {self.straggler!r}: choose retry, close or convert")
        self._check_groups()
        one_batch = self.batch_size * self.longest_trajectory_bytes
        if self.max_bytes < one_batch:
            raise ConfigError(
                f"buffer.max_mib = {self.max_bytes / 2**20:g} cannot hold one batch of {self.batch_size} trajectories "
                f"of the greatest length ({one_batch / 2**20:.1f} MiB): raise it, or lower buffer.batch_size or "
                "rollout.max_tokens"
            )

    def _check_groups(self) -> None:
        if self.batch_size % self.group_size:
            raise ConfigError(
                f"buffer.batch_size = {self.batch_size} is not a multiple of groups.size = {self.group_size}: "
                "a batch is made of whole groups"
            )
        if self.group_size == 1 or self.straggler == "retry":
            return
        if self.close_at is None or not 2 <= self.close_at <= self.group_size:
            raise ConfigError(
                f"groups.close_at = {self.close_at}: groups.straggler = {self.straggler!r} needs a number of members "
                f"between 2 and groups.size = {self.group_size}"
            )

    @property
    def units_per_batch(self) -> int:
        return self.batch_size // self.group_size

    @property
    def admission_limit(self) -> int:
        """Most samples that may be live at once: (η + 1) · B."""
        return (self.staleness_bound + 1) * self.batch_size
