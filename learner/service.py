"""The learner as a Ray actor: builds the parts of a `TrainingLoop` and hosts it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from buffer.client import RayLearnerLink
from common.config import RunConfig
from common.logs import log_to_file
from common.publications import publication_name
from learner.steps import StartRecord, StepRecord

if TYPE_CHECKING:
    from learner.loop import TrainingLoop


class LearnerService:
    """Ray shell of `TrainingLoop`. Start it with `ray.remote`; see deploy/services.py.

    An error of a constructor would reach nobody as itself: Ray makes a dead actor of it. So everything is built later.
    """

    def __init__(self, config: RunConfig, model_folder: Path, run_dir: Path, buffer: ActorHandle) -> None:
        log_to_file(run_dir, "learner")
        self._config = config
        self._model_folder = model_folder
        self._run_dir = run_dir
        self._buffer = buffer
        self._loop: TrainingLoop | None = None

    def start(self) -> StartRecord:
        """Build everything, restore and publish.

        Raises:
            ConfigError, ModelError, ResourceError: see `Learner`, `Publisher` and `TrainingLoop.start`.
        """
        self._loop = self._build()
        return self._loop.start()

    def step(self, wait_s: float) -> StepRecord | None:
        assert self._loop is not None
        return self._loop.step(wait_s)

    def save(self) -> str:
        assert self._loop is not None
        return self._loop.save()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _build(self) -> TrainingLoop:
        # Here, in the learner's own process: the driver, which names this class, needs no torch.
        from learner.checkpoint import CheckpointStore
        from learner.loop import TrainingLoop
        from learner.publisher import Publisher
        from learner.update import Learner

        config, run_dir = self._config, self._run_dir
        node_id = ray.get_runtime_context().get_node_id()
        return TrainingLoop(
            config,
            Learner(config, self._model_folder),
            Publisher(Path(config.weights.folder), publication_name(run_dir), node_id=node_id),
            CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep),
            RayLearnerLink(self._buffer),
            run_dir,
        )
