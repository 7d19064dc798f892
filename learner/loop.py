"""From batch to published version: what the learner does between two batches, without Ray."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from buffer.links import LearnerLink
from common.config import RunConfig
from common.types import BatchId, BatchOutcome, WeightVersion
from learner.checkpoint import CheckpointStore
from learner.publisher import Publisher
from learner.steps import StartRecord, StepRecord, note_highest_version
from learner.update import Learner

log = logging.getLogger(__name__)


class TrainingLoop:
    """Takes batches, updates, publishes, finishes, saves.

    The order is what keeps the ledger true: a label is on disk before it is announced, so that it is never used again
    whatever dies; a version is announced before the `finish` that moves to it; and a checkpoint names the last finished
    batch, so that a restore knows which samples its weights contain.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: Learner,
        publisher: Publisher,
        checkpoints: CheckpointStore,
        link: LearnerLink,
        run_dir: Path,
    ) -> None:
        self._config = config
        self._learner = learner
        self._publisher = publisher
        self._checkpoints = checkpoints
        self._link = link
        self._run_dir = run_dir
        self._last_finished: BatchId | None = None
        self._checkpoint = ""  # folder of the newest one
        self._unsaved_batches = 0  # finished since then

    def start(self) -> StartRecord:
        """Restore the newest complete checkpoint, if there is one, and publish."""
        folder = self._checkpoints.newest()
        if folder is not None:
            self._last_finished = self._learner.restore(folder)
            self._checkpoint = str(folder)
        version = self._link.restore(self._last_finished, WeightVersion(self._learner.weight_version))
        self._learner.weight_version = version  # setting the version: a label never goes back
        self._publish()
        return StartRecord(
            completed_updates=self._learner.completed_updates,
            version=version,
            checkpoint=self._checkpoint,
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
        self._unsaved_batches += 1
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
        """Save a checkpoint of the present state, unless the newest one is of it; returns its folder."""
        if self._checkpoint and not self._unsaved_batches:
            return self._checkpoint
        folder, oldest_batch = self._checkpoints.save(
            self._learner, last_finished_batch=self._last_finished, buffer_state=self._link.state()
        )
        self._checkpoint, self._unsaved_batches = str(folder), 0
        if oldest_batch is not None:
            self._link.forget_batches_up_to(oldest_batch)
        log.info("saved %s", folder)
        return self._checkpoint

    def close(self) -> None:
        self._publisher.close()

    def _publish(self) -> None:
        manifest = self._publisher.publish(self._learner.weight_version, self._learner)
        note_highest_version(self._run_dir, WeightVersion(manifest.version))
        self._link.announce(manifest)

    def _save_if_due(self) -> str:
        # Batches without an update count: a value model in its warm-up, too, has something to lose.
        every = self._config.checkpoint.every_updates
        return self.save() if every and self._unsaved_batches >= every else ""
