"""A rollout actor as a Ray actor: builds the parts of a `RolloutWorker` and hosts it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle

from actors.build import build_worker
from actors.node_cache import NodeCache
from actors.rollout import ActorStatus, EvaluationResult
from buffer.client import RayActorLink
from common.config import RunConfig
from common.logs import log_to_file
from common.types import Prompt
from common.weights import WeightManifest


class RolloutActorService:
    """Ray shell of `RolloutWorker`. Start it with `ray.remote`; see deploy/services.py."""

    def __init__(
        self, actor_id: str, config: RunConfig, model_folder: Path, run_dir: Path, buffer: ActorHandle
    ) -> None:
        log_to_file(run_dir, actor_id)
        node_id = ray.get_runtime_context().get_node_id()
        self._cache = NodeCache(Path(config.weights.folder), node_id, fetch=_fetch_from_node)
        self._worker = build_worker(actor_id, config, model_folder, RayActorLink(buffer, localise=self._cache.localise))

    async def start(self) -> int:
        """Load the engine; returns the process id."""
        await self._worker.start()
        return os.getpid()

    async def run(self) -> None:
        """Roll out until the buffer says that the run is over; raises what ended it otherwise."""
        await self._worker.run()

    async def evaluate(
        self, prompts: Sequence[Prompt], min_version: int, temperature: float, seed: int
    ) -> EvaluationResult:
        return await self._worker.evaluate(prompts, min_version=min_version, temperature=temperature, seed=seed)

    async def status(self) -> ActorStatus:
        return self._worker.status()

    async def close(self) -> None:
        await self._worker.close()
        self._cache.close()


async def _fetch_from_node(manifest: WeightManifest) -> bytes:
    """Bytes of a publication, read on the node that holds them and carried by Ray's object store."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(manifest.node_id, soft=False)
    read = ray.remote(num_cpus=0)(_read_file).options(scheduling_strategy=strategy)
    return await read.remote(manifest.path)  # type: ignore[no-any-return]


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()
