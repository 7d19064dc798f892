"""Learner and actor on two Ray nodes: weights travel through Ray's object store."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from learner.tiny_model import TinySettings, prepare_tiny_model
from tests.run_kit import SMALL, Run, records, trained_rows

FILLED = 0.4  # of each node's CPU; the learner and the actor, which take 0.5 each, then cannot share a node
pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]


def test_actor_on_another_node_gets_every_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # both nodes are on this machine's loopback
    model_folder = prepare_tiny_model(0, tmp_path / "models", print, TinySettings(steps=20))
    run_dir = tmp_path / "run"
    before = set(Path("/dev/shm").glob("*-v*.bin"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        fillers = [fill(node["NodeID"]) for node in ray.nodes()]
        words = ("recipe=grpo-dis", "groups.size=4", "max_updates=4", f"ray.address={cluster.address}")
        status, output = Run("train", *SMALL, *words, f"model.path={model_folder}", f"run_dir={run_dir}").finish()
        assert len(fillers) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert status == 0, output
    evaluations = [(record["version_oldest"], record["version_newest"]) for record in records(run_dir, "evaluation")]
    assert evaluations == [(0, 0), (4, 4)]
    assert len(list(trained_rows(run_dir))) == 4 * 16
    assert set(Path("/dev/shm").glob("*-v*.bin")) - before == set()


def fill(node_id: str) -> ActorHandle:
    """Take up a part of a node for as long as the handle lives."""

    class Filler:  # in here, Ray takes it along by value: its workers cannot import the tests
        def wait(self) -> None:
            pass

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    filler = ray.remote(num_cpus=FILLED)(Filler).options(scheduling_strategy=strategy).remote()
    ray.get(filler.wait.remote(), timeout=60)
    return filler
