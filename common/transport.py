"""How the bytes of a publication travel from the learner to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from common.errors import ConfigError

Transport = Literal["shared_memory", "nccl", "ipc"]

OPTION = "weights.transport"


def choose_transport(
    learner_device_id: str | None,
    engine_device_ids: Sequence[str],
    same_node: bool,
    *,
    requested: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto",
) -> Transport:
    """Way of the weights from one learner to one engine, decided before either opens a connection.

    NCCL refuses two ranks on one device and can hang while it does; CUDA IPC needs the learner's memory on each of the
    engine's devices. Shared memory goes through the host and always works.

    Args:
        learner_device_id: the learner's GPU (its UUID, or its index on the node); None when it trains on the CPU.
        engine_device_ids: the engine's GPUs, named alike; empty when it runs on the CPU.
        same_node: both are on one node. Equal ids of different nodes are different devices.
        requested: the setting `weights.transport`.

    Raises:
        ConfigError: what was requested cannot work between these devices.
    """
    if learner_device_id is None or not engine_device_ids:
        if requested in ("nccl", "ipc"):
            side = "the learner" if learner_device_id is None else "the engine"
            raise ConfigError(f"{OPTION} = {requested!r} needs GPUs, but {side} runs on the CPU; set it to 'auto'")
        return "shared_memory"

    shares_device = same_node and learner_device_id in engine_device_ids
    shares_all = same_node and set(engine_device_ids) == {learner_device_id}
    if requested == "nccl" and shares_device:
        raise ConfigError(
            f"{OPTION} = 'nccl' cannot join learner and engine on one device (GPU {learner_device_id}); "
            "set it to 'auto', or give each a device of its own"
        )
    if requested == "ipc" and not shares_all:
        raise ConfigError(
            f"{OPTION} = 'ipc' needs learner and engine on one device, but the learner has GPU {learner_device_id} and "
            f"the engine {', '.join(engine_device_ids)}{'' if same_node else ' of another node'}; set it to 'auto'"
        )
    if requested != "auto":
        return requested
    if shares_all:
        return "ipc"
    return "shared_memory" if shares_device else "nccl"
