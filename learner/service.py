"""The learner as a Ray actor: builds the parts of a `TrainingLoop` and hosts it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import ray
from ray.actor import ActorHandle

from buffer.client import RayLearnerLink
from common.config import RunConfig
from common.logs import log_to_file
from learner.steps import StartRecord, StepRecord


class LearnerService:
    """Ray shell of `TrainingLoop`. Start it with `ray.remote`; see deploy/services.py."""

    def __init__(self, config: RunConfig, model_folder: Path, run_dir: Path, buffer: ActorHandle) -> None:
        log_to_file(run_dir, "learner")
        # Here, in the learner's own process: the driver, which names this class, needs no torch.
        from learner.checkpoint import CheckpointStore
        from learner.loop import TrainingLoop
        from learner.publisher import Publisher
        from learner.update import Learner

        node_id = ray.get_runtime_context().get_node_id()
        self._loop = TrainingLoop(
            config,
            Learner(config, model_folder),
            Publisher(Path(config.weights.folder), publication_name(run_dir), node_id=node_id),
            CheckpointStore(run_dir / "checkpoints", keep=config.checkpoint.keep),
            RayLearnerLink(buffer),
        )

    def start(self) -> StartRecord:
        return self._loop.start()

    def step(self, wait_s: float) -> StepRecord | None:
        return self._loop.step(wait_s)

    def save(self) -> str:
        return self._loop.save()

    def close(self) -> None:
        self._loop.close()


def publication_name(run_dir: Path) -> str:
    """Prefix of a run's files in memory that runs share: its folder's name, told apart from others of that name."""
    return f"slipstream-{run_dir.name}-{blake2b(str(run_dir).encode(), digest_size=4).hexdigest()}"
