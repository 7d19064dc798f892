"""Ray shells of learner and actor, without Ray: nothing is built before `start`, and either can be closed before it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import actors.service as actor_module
import learner.service as learner_module
from actors.service import RolloutActorService
from common.errors import ConfigError, ModelError
from common.weights import Canary, WeightManifest
from learner.service import LearnerService
from tests.learner_kit import make_config


class Context:
    def get_node_id(self) -> str:
        return "node-1"


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a service, standard output goes to its log file; here it stays the test's."""
    for module in (actor_module, learner_module):
        monkeypatch.setattr(module, "log_to_file", lambda run_dir, name: None)
        monkeypatch.setattr(module.ray, "get_runtime_context", Context)


def make_learner(tmp_path: Path) -> LearnerService:
    buffer: Any = None
    return LearnerService(make_config("grpo-dis"), tmp_path / "no-model", tmp_path, buffer)


def make_actor(tmp_path: Path, *words: str) -> RolloutActorService:
    settings = ("engine.kind=in_process", "engine.device=cpu", "weights.transport=shared_memory", *words)
    buffer: Any = None
    return RolloutActorService("actor-0", make_config("grpo-dis", *settings), tmp_path / "no-model", tmp_path, buffer)


def test_a_learner_says_itself_what_is_wrong_with_its_model(tmp_path: Path) -> None:
    service = make_learner(tmp_path)
    with pytest.raises(ModelError, match="no-model"):
        service.start()
    service.close()


def test_an_actor_says_itself_what_is_wrong_with_its_settings(tmp_path: Path) -> None:
    service = make_actor(tmp_path, "environment.name=nowhere:Nothing")
    with pytest.raises(ConfigError, match="environment.name = 'nowhere:Nothing'"):
        asyncio.run(service.start())
    asyncio.run(service.close())


def test_services_that_were_never_started_can_be_closed(tmp_path: Path) -> None:
    make_learner(tmp_path).close()
    asyncio.run(make_actor(tmp_path).close())


@pytest.mark.parametrize(("lost", "gone"), [("node", True), ("file", True), ("right", False)])
def test_a_publication_whose_node_is_lost_is_gone(monkeypatch: pytest.MonkeyPatch, lost: str, gone: bool) -> None:
    from ray.exceptions import NodeDiedError, RayTaskError

    causes = {"file": FileNotFoundError("v1.bin"), "right": PermissionError("v1.bin")}
    error = NodeDiedError("lost") if lost == "node" else RayTaskError("f", "", causes[lost]).as_instanceof_cause()

    class Read:
        def options(self, **_: Any) -> Read:
            return self

        async def remote(self, path: str) -> bytes:
            raise error

    monkeypatch.setattr("actors.service.ray.remote", lambda **_: lambda function: Read())
    canary = Canary(token_ids=(1, 2), logprobs=(-1.0,))
    manifest = WeightManifest(
        version=1, path="v1.bin", size_bytes=1, digest="", tensors=(), canary=canary, node_id="0" * 56
    )
    with pytest.raises(FileNotFoundError if gone else PermissionError):
        asyncio.run(actor_module._fetch_from_node(manifest))
