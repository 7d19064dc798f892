"""The services of a run on Ray: where each goes, with what, and how it is ended."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.build import engine_settings
from actors.engine import engine_environment
from actors.service import RolloutActorService
from buffer.service import ReplayBufferService
from common.config import RunConfig
from common.errors import ResourceError
from deploy.failures import first_line
from deploy.placement import CPUS, needed_cpus
from learner.service import LearnerService

END_LIMIT_S = 10.0  # what a service gets to end by itself


@contextlib.contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """A Ray of our own, or the cluster that the config or RAY_ADDRESS names. Ends what it started.

    Raises:
        ResourceError: the cluster cannot be reached.
    """
    address = config.ray.address or os.environ.get("RAY_ADDRESS", "")
    try:
        _connect(config, address)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if not address:
            raise
        where = "ray.address" if config.ray.address else "RAY_ADDRESS"
        raise ResourceError(
            f"{where} = {address!r}: no Ray cluster answers there ({first_line(error)}); start it, or unset {where} to "
            "start Ray on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _connect(config: RunConfig, address: str) -> None:
    # Neither found, a Ray that happens to run on this machine is left alone: "local" starts a new one. There CPUs are
    # mere book-keeping, and a machine with fewer than the services ask for runs them all the same.
    ray.init(
        address=address or "local",
        num_cpus=None if address else max(os.cpu_count() or 1, math.ceil(needed_cpus(config))),
        include_dashboard=False if not address else None,
        log_to_driver=False,
        logging_level="ERROR",  # below it are hints for people who run Ray by hand
        configure_logging=True,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}} if address else None,
    )


def count_gpus() -> int:
    """GPUs of the Ray cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


@dataclass
class Services:
    """Starts and ends the Ray actors of one run."""

    config: RunConfig
    model_folder: Path
    run_dir: Path
    alive: dict[str, ActorHandle] = field(default_factory=dict)  # by name

    def start_buffer(self, state: Mapping[str, Any] | None) -> ActorHandle:
        options = {"num_cpus": CPUS["buffer"], "max_concurrency": 1024}
        return self._start("buffer", ReplayBufferService, options, self.config, self.run_dir, state)

    def start_learner(self) -> ActorHandle:
        gpu = self.config.learner.device == "cuda"
        options = {"num_cpus": CPUS["learner on GPU" if gpu else "learner"], "num_gpus": int(gpu)}
        environment = {
            "OMP_NUM_THREADS": str(self.config.learner.num_threads),
            "MKL_NUM_THREADS": str(self.config.learner.num_threads),
        }
        arguments = (self.config, self.model_folder, self.run_dir, self.alive["buffer"])
        return self._start("learner", LearnerService, options, *arguments, environment=environment)

    def start_actor(self, actor_id: str) -> ActorHandle:
        gpu = self.config.engine.device == "cuda"
        options = {
            "num_cpus": CPUS["actor on GPU" if gpu else "actor"],
            "num_gpus": self.config.engine.tensor_parallel_size if gpu else 0,
            "max_concurrency": 64,
        }
        environment = engine_environment(engine_settings(self.config, self.model_folder))
        arguments = (actor_id, self.config, self.model_folder, self.run_dir, self.alive["buffer"])
        return self._start(actor_id, RolloutActorService, options, *arguments, environment=environment)

    def end(self, name: str) -> None:
        """Kill one service; no harm if it is dead or unknown."""
        handle = self.alive.pop(name, None)
        if handle is not None:
            ray.kill(handle)

    def end_all(self) -> None:
        """Ask every service to close, then kill what is left."""
        closing = [
            handle.close.remote() for name, handle in sorted(self.alive.items(), key=lambda item: item[0] == "buffer")
        ]
        ray.wait(closing, num_returns=len(closing), timeout=END_LIMIT_S) if closing else None
        for name in list(self.alive):
            self.end(name)

    def _start(
        self,
        name: str,
        cls: type,
        options: dict[str, Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
    ) -> ActorHandle:
        variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **(environment or {})}
        remote = ray.remote(**options)(cls)
        handle = remote.options(runtime_env={"env_vars": variables}, max_restarts=0).remote(*arguments)
        self.alive[name] = handle
        return handle
