from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.transport import choose_transport


@pytest.mark.parametrize(
    ("learner", "engine", "same_node", "expected"),
    [
        (None, [], True, "shared_memory"),
        (None, ["0"], True, "shared_memory"),
        ("0", [], True, "shared_memory"),
        ("0", ["1"], True, "nccl"),
        ("0", ["0"], False, "nccl"),
        ("0", ["0"], True, "ipc"),
        ("0", ["0", "1"], True, "shared_memory"),
    ],
    ids=["no gpu", "cpu learner", "cpu engine", "two gpus", "same index elsewhere", "one gpu", "one of two shared"],
)
def test_automatic_choice(learner: str | None, engine: list[str], same_node: bool, expected: str) -> None:
    assert choose_transport(learner, engine, same_node) == expected


def test_nccl_on_one_device_is_refused_by_name() -> None:
    """F-06."""
    with pytest.raises(ConfigError, match=r"weights\.transport = 'nccl'.*GPU-7f"):
        choose_transport("GPU-7f", ["GPU-7f"], True, requested="nccl")
    with pytest.raises(ConfigError, match="nccl"):
        choose_transport("0", ["1", "0"], True, requested="nccl")


def test_nccl_between_distinct_devices_is_allowed() -> None:
    assert choose_transport("0", ["1", "2"], True, requested="nccl") == "nccl"
    assert choose_transport("0", ["0"], False, requested="nccl") == "nccl"


@pytest.mark.parametrize(("engine", "same_node"), [(["1"], True), (["0", "1"], True), (["0"], False)])
def test_ipc_without_a_shared_device_is_refused(engine: list[str], same_node: bool) -> None:
    with pytest.raises(ConfigError, match=r"weights\.transport = 'ipc'"):
        choose_transport("0", engine, same_node, requested="ipc")


@pytest.mark.parametrize("requested", ["nccl", "ipc"])
def test_gpu_transports_without_a_gpu_are_refused(requested: str) -> None:
    with pytest.raises(ConfigError, match="the learner runs on the CPU"):
        choose_transport(None, ["0"], True, requested=requested)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the engine runs on the CPU"):
        choose_transport("0", [], True, requested=requested)  # type: ignore[arg-type]


def test_shared_memory_works_everywhere() -> None:
    for learner, engine in ((None, []), ("0", ["0"]), ("0", ["1"])):
        assert choose_transport(learner, engine, True, requested="shared_memory") == "shared_memory"
