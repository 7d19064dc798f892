"""Which devices and how many CPUs the services of a run get. Imports nothing heavy: a plan is made without starting."""

from __future__ import annotations

from typing import Any

from common.config import RunConfig
from common.errors import ConfigError, ResourceError
from common.transport import Transport, choose_transport

# What Ray sets aside for a service. Shares below 1, so that all of them start on two cores.
CPUS = {"buffer": 0.1, "learner": 0.5, "actor": 0.5, "learner on GPU": 1, "actor on GPU": 1}


def needed_cpus(config: RunConfig) -> float:
    """What Ray sets aside for all services on CPUs."""
    return CPUS["buffer"] + CPUS["learner"] + config.rollout.num_actors * CPUS["actor"]


def resolve_auto(config: RunConfig, num_gpus: int) -> RunConfig:
    """Settings that say `auto`, decided by whether there are GPUs.

    Raises:
        ResourceError: the run asks for more GPUs than there are.
    """
    device = "cuda" if num_gpus else "cpu"
    engine = config.engine.device if config.engine.device != "auto" else device
    learner = config.learner.device if config.learner.device != "auto" else device
    needed = config.rollout.num_actors * config.engine.tensor_parallel_size * (engine == "cuda") + (learner == "cuda")
    if needed > num_gpus:
        raise ResourceError(
            f"{config.rollout.num_actors} actors (engine.device = {engine}) and the learner (learner.device = "
            f"{learner}) need {needed} GPUs, and there are {num_gpus}: lower rollout.num_actors, or set a device to cpu"
        )
    changes: dict[str, dict[str, Any]] = {
        "engine": {"device": engine, "kind": _or(config.engine.kind, "async" if engine == "cuda" else "in_process")},
        "learner": {"device": learner},
        "weights": {"transport": _transport(config, learner=learner, engine=engine)},
    }
    return config.model_copy(
        update={table: getattr(config, table).model_copy(update=values) for table, values in changes.items()}
    )


def _transport(config: RunConfig, *, learner: str, engine: str) -> Transport:
    """How weights travel. Shared memory goes through the host, and between GPUs too.

    Raises:
        ConfigError: what was asked for cannot work between these devices, or cannot yet.
    """
    # Ray gives whole GPUs, so that the learner's is never an engine's.
    learner_gpu = "of the learner" if learner == "cuda" else None
    engine_gpus = ["of the engine"] if engine == "cuda" else []
    requested = config.weights.transport
    chosen = choose_transport(learner_gpu, engine_gpus, same_node=True, requested=requested)
    if chosen != "shared_memory" and requested != "auto":
        raise ConfigError(
            f"weights.transport = {requested!r}: engines can receive through it, but the learner cannot send yet; "
            "set it to 'auto' for shared memory, which works between GPUs too"
        )
    return "shared_memory"


def _or(chosen: str, automatic: str) -> str:
    return automatic if chosen == "auto" else chosen
