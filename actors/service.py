"""A rollout actor as a Ray actor: builds the parts of a `RolloutWorker` and hosts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from actors.build import build_worker
from actors.node_cache import NodeCache
from actors.rollout import ActorStatus, EvaluationResult, RolloutWorker
from buffer.client import RayActorLink
from common.config import RunConfig
from common.logs import log_to_file
from common.types import Prompt
from common.weights import WeightManifest


class RolloutActorService:
    """Ray shell of `RolloutWorker`. Start it with `ray.remote`; see deploy/services.py.

    An error of a constructor would reach nobody as itself: Ray makes a dead actor of it. So everything is built later.
    """

    def __init__(
        self, actor_id: str, config: RunConfig, model_folder: Path, run_dir: Path, buffer: ActorHandle
    ) -> None:
        log_to_file(run_dir, actor_id)
        self._actor_id = actor_id
        self._config = config
        self._model_folder = model_folder
        self._buffer = buffer
        self._cache: NodeCache | None = None
        self._worker: RolloutWorker | None = None

    async def start(self) -> int:
        """Build everything and load the engine; returns the process id.

        Raises:
            ConfigError, ModelError, ResourceError, EngineDeadError: see `build_worker` and `RolloutWorker.start`.
        """
        node_id = ray.get_runtime_context().get_node_id()
        self._cache = NodeCache(Path(self._config.weights.folder), node_id, fetch=_fetch_from_node)
        link = RayActorLink(self._buffer, localise=self._cache.localise)
        self._worker = build_worker(self._actor_id, self._config, self._model_folder, link)
        await self._worker.start()
        return os.getpid()

    async def run(self) -> None:
        """Roll out until the buffer says that the run is over; raises what ended it otherwise."""
        await self._started().run()

    async def evaluate(
        self, prompts: Sequence[Prompt], min_version: int, temperature: float, seed: int
    ) -> EvaluationResult:
        return await self._started().evaluate(prompts, min_version=min_version, temperature=temperature, seed=seed)

    async def status(self) -> ActorStatus:
        return self._started().status()

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close()
        if self._cache is not None:
            self._cache.close()

    def _started(self) -> RolloutWorker:
        assert self._worker is not None
        return self._worker


async def _fetch_from_node(manifest: WeightManifest) -> bytes:
    """Bytes of a publication, read on the node that holds them and carried by Ray's object store.

    Raises:
        FileNotFoundError: the file is gone, or its node is.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(manifest.node_id, soft=False)
    read = ray.remote(num_cpus=0)(_read_file).options(scheduling_strategy=strategy)
    try:
        return await read.remote(manifest.path)  # type: ignore[no-any-return]
    except RayTaskError:
        raise  # what reading raised
    except RayError as error:
        raise FileNotFoundError(f"{manifest.path} on node {manifest.node_id[:8]}: {error}") from error


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()
