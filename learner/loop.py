"""From batch to published version: what the learner does between two batches, without Ray."""

from __future__ import annotations

import logging
import time

from buffer.links import LearnerLink
from common.config import RunConfig
from common.types import BatchId, BatchOutcome, WeightVersion
from learner.checkpoint import CheckpointStore
from learner.publisher import Publisher
from learner.steps import StartRecord, StepRecord
from learner.update import Learner

log = logging.getLogger(__name__)


class TrainingLoop:
    """Takes batches, updates, publishes, finishes, saves.

    The order is what keeps the ledger true: a version is announced before the `finish` that moves to it, and a
    checkpoint names the last finished batch, so that a restore knows which samples its weights contain.
    """

    def __init__(
        self, config: RunConfig, learner: Learner, publisher: Publisher, checkpoints: CheckpointStore, link: LearnerLink
    ) -> None:
        self._config = config
        self._learner = learner
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._link = link
        self._last_finished: BatchId | None = None
        self._saved_at: int | None = None  # completed updates of the newest checkpoint

    def start(self) -> StartRecord:
        """Restore the newest complete checkpoint, if there is one, and publish."""
        folder = self._checkpoints.newest()
        if folder is not None:
            self._last_finished = self._learner.restore(folder)
            self._saved_at = self._learner.completed_updates
        version = self._link.restore(self._last_finished, WeightVersion(self._learner.weight_version))
        self._learner.weight_version = version  # setting the version: a label never goes back
        self._publish()
        return StartRecord(
            completed_updates=self._learner.completed_updates,
            version=version,
            checkpoint=str(folder or ""),
            num_parameters=self._learner.num_parameters,
            num_trainable=self._learner.num_trainable,
        )

    def step(self, wait_s: float) -> StepRecord | None:
        """Train on the next batch; none when `wait_s` passed without one."""
        asked = time.monotonic()
        batch = self._link.take_batch(wait_s)
        if batch is None:
            return None
        started = time.monotonic()
        result = self._learner.update(batch.trajectories, batch.version)
        updated = time.monotonic()
        if result.outcome is BatchOutcome.COMMITTED:
            self._learner.weight_version = batch.version + 1  # the version moves here and nowhere else
            self._publish()
        published = time.monotonic()
        self._link.finish(batch.batch_id, result.outcome, WeightVersion(self._learner.weight_version))
        self._last_finished = batch.batch_id
        metrics = {
            **result.metrics,
            "time/wait_s": started - asked,
            "time/update_s": updated - started,
            "time/publish_s": published - updated,
        }
        return StepRecord(
            outcome=result.outcome,
            completed_updates=self._learner.completed_updates,
            version=WeightVersion(self._learner.weight_version),
            metrics=metrics,
            is_last=batch.is_last,
            reason=result.reason,
            checkpoint=self._save_if_due(),
        )

    def save(self) -> str:
        """Save a checkpoint of the present state; returns its folder."""
        if self._saved_at == self._learner.completed_updates:
            return str(self._checkpoints.newest())
        folder, oldest_batch = self._checkpoints.save(
            self._learner, last_finished_batch=self._last_finished, buffer_state=self._link.state()
        )
        self._saved_at = self._learner.completed_updates
        if oldest_batch is not None:
            self._link.forget_batches_up_to(oldest_batch)
        log.info("saved %s", folder)
        return str(folder)

    def close(self) -> None:
        self._publisher.close()

    def _publish(self) -> None:
        self._link.announce(self._publisher.publish(self._learner.weight_version, self._learner))

    def _save_if_due(self) -> str:
        every, updates = self._config.checkpoint.every_updates, self._learner.completed_updates
        # A batch may bring several updates, and so step over a multiple.
        due = every and updates // every > (self._saved_at or 0) // every
        return self.save() if due else ""
