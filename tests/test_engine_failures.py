"""What an engine does when it dies, when a canary fails, and when its owner is killed. Each test has its own engine."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from actors import engine_vllm
from actors.engine import Engine, make_engine
from common.errors import CanaryError, EngineDeadError, SlipstreamError
from common.types import FinishReason
from common.weights import WeightManifest
from tests.engine_fixtures import (
    HeldCanary,
    Loop,
    publish,
    randomize,
    reference_logprobs,
    request,
    settings_for,
    tiny_model,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(tied=True)


@pytest.fixture(scope="module")
def model_path(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def start_engine(loop: Loop, model_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(path: Path = model_path, **overrides: Any) -> Engine:
        engines.append(make_engine(settings_for(path, **overrides)))
        loop(engines[-1].start())
        return engines[-1]

    yield start
    for engine in engines:
        loop(engine.close())


async def outcome(work: Any) -> Any:
    try:
        return await work
    except SlipstreamError as error:
        return error


def wrong_canary(model: PreTrainedModel, folder: Path, patch: pytest.MonkeyPatch) -> WeightManifest:
    manifest = publish(model, 1, folder)
    logprobs = (manifest.canary.logprobs[0] + 0.001, *manifest.canary.logprobs[1:])
    return dataclasses.replace(manifest, canary=dataclasses.replace(manifest.canary, logprobs=logprobs))


def dropped_tensors(model: PreTrainedModel, folder: Path, patch: pytest.MonkeyPatch) -> WeightManifest:
    patch.setattr("actors.weight_receiver.load_layerwise", lambda *_: None)
    return publish(model, 1, folder)


def weights_with_nan(model: PreTrainedModel, folder: Path, patch: pytest.MonkeyPatch) -> WeightManifest:
    healthy = publish(model, 1, folder).canary
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.get_parameter("model.norm.weight")[0] = torch.nan
    return dataclasses.replace(publish(broken, 1, folder), canary=healthy)


def stale_head(model: PreTrainedModel, folder: Path, patch: pytest.MonkeyPatch) -> WeightManifest:
    """What vLLM's own reload does with a tied head on CPUs."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    patch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda *_: None)
    return publish(model, 1, folder)


@pytest.mark.parametrize("make_manifest", [wrong_canary, dropped_tensors, weights_with_nan, stale_head])
def test_failed_canary_ends_the_engine_and_what_it_withheld(
    make_manifest: Callable[[PreTrainedModel, Path, pytest.MonkeyPatch], WeightManifest],
    start_engine: Callable[..., Engine],
    loop: Loop,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F-01 (a): a transport that drops every tensor; the version does not move."""
    engine = start_engine()
    manifest = make_manifest(randomize(copy.deepcopy(model), 3), tmp_path, monkeypatch)

    async def load_midway() -> tuple[Any, Any]:
        running = asyncio.ensure_future(outcome(engine.generate(request([1, 2], max_new_tokens=300))))
        await engine.generate(request([3], max_new_tokens=4))
        loaded = await outcome(engine.load_weights(manifest))
        return loaded, await running

    loaded, generated = loop(load_midway())
    assert isinstance(loaded, CanaryError)
    assert "version 1: log-prob of canary token" in str(loaded)
    assert isinstance(generated, CanaryError)
    assert engine.weight_version == 0
    for work in (
        engine.generate(request([1])),
        engine.load_weights(publish(model, 2, tmp_path)),
        engine.score([1, 2]),
    ):
        with pytest.raises(EngineDeadError, match="refuses work: version 1"):
            loop(work)


def test_finished_generation_of_a_version_that_fails_is_discarded(
    start_engine: Callable[..., Engine],
    loop: Loop,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start_engine()
    manifest = wrong_canary(model, tmp_path, monkeypatch)

    async def fail_late() -> tuple[Any, Any]:
        canary = HeldCanary(engine)
        try:
            load = asyncio.ensure_future(outcome(engine.load_weights(manifest)))
            await canary.resumed.wait()
            generation = asyncio.ensure_future(outcome(engine.generate(request([1, 2], max_new_tokens=4))))
            await canary.generated.wait()
        finally:
            canary.release()
        return await load, await generation

    for error in loop(fail_late()):
        assert isinstance(error, CanaryError)


def test_canary_that_is_never_answered_ends_the_engine(
    start_engine: Callable[..., Engine],
    loop: Loop,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_vllm, "CANARY_TIME_LIMIT_S", 0.2)
    engine = start_engine()

    async def never_answered() -> None:
        canary = HeldCanary(engine)
        try:
            await engine.load_weights(publish(model, 1, tmp_path))
        finally:
            canary.release()

    with pytest.raises(CanaryError, match="no answer to the canary"):
        loop(never_answered())
    assert engine.weight_version == 0


def test_error_in_a_step_reaches_every_pending_call(start_engine: Callable[..., Engine], loop: Loop) -> None:
    """F-05: the engine dies, its process lives."""
    engine = start_engine()
    llm: Any = engine._driver._llm  # type: ignore[attr-defined]

    def broken_step() -> None:
        raise RuntimeError("the device is on fire")

    async def die_midway() -> list[Any]:
        running = [asyncio.ensure_future(outcome(engine.generate(request([i], max_new_tokens=300)))) for i in range(4)]
        await engine.generate(request([9], max_new_tokens=4))
        llm.step = broken_step
        return await asyncio.gather(*running)

    for error in loop(die_midway()):
        assert isinstance(error, EngineDeadError)
        assert "the device is on fire" in str(error)
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        loop(engine.generate(request([1])))


def test_load_that_breaks_off_ends_the_engine(
    start_engine: Callable[..., Engine],
    loop: Loop,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken_load(*_: Any) -> None:
        raise MemoryError("half of the model")

    engine = start_engine()
    monkeypatch.setattr("actors.weight_receiver.load_layerwise", broken_load)
    with pytest.raises(EngineDeadError, match="half of the model"):
        loop(engine.load_weights(publish(model, 1, tmp_path)))
    assert engine.weight_version == 0


def test_close_ends_pending_calls_and_may_be_repeated(start_engine: Callable[..., Engine], loop: Loop) -> None:
    engine = start_engine()
    num_threads = torch.get_num_threads()

    async def close_midway() -> Any:
        running = asyncio.ensure_future(outcome(engine.generate(request([1], max_new_tokens=300))))
        await engine.generate(request([2], max_new_tokens=4))
        await engine.close()
        await engine.close()
        return await running

    error = loop(close_midway())
    assert isinstance(error, EngineDeadError)
    assert "closed" in str(error)
    torch.set_num_threads(num_threads + 1)  # vLLM makes this a function without effect while it runs
    assert torch.get_num_threads() == num_threads + 1
    torch.set_num_threads(num_threads)


def test_models_generation_config_gives_stop_tokens_but_no_sampling(
    start_engine: Callable[..., Engine], loop: Loop, model: PreTrainedModel, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    eos = [40, 41, 42, 43]
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.01, "top_k": 1, "top_p": 0.1, "eos_token_id": eos})
    )
    engine = start_engine(tmp_path)

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(engine.generate(request([1, 2], seed=seed, max_new_tokens=60)) for seed in range(12))
        )

    reasons = []
    for generation in loop(several()):
        tokens = generation.token_ids.tolist()
        reasons.append(generation.finish_reason)
        assert not set(eos) & set(tokens[:-1])
        assert (tokens[-1] in eos) is (generation.finish_reason is FinishReason.STOP)
        reference = reference_logprobs(model, [1, 2, *tokens])[1:]
        assert abs(reference - generation.logprobs).max() < 1e-4
    assert FinishReason.STOP in reasons


def test_death_of_the_engines_process_reaches_every_pending_call(
    start_engine: Callable[..., Engine], loop: Loop
) -> None:
    """F-05."""
    engine = start_engine(kind="async")
    (process,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]

    async def kill_midway() -> list[Any]:
        running = [asyncio.ensure_future(outcome(engine.generate(request([i], max_new_tokens=300)))) for i in range(4)]
        await engine.generate(request([9], max_new_tokens=4))
        os.kill(process.pid or 0, signal.SIGKILL)
        return await asyncio.gather(*running)

    for error in loop(kill_midway()):
        assert isinstance(error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="refuses work"):
        loop(engine.generate(request([1])))


OWNER = """
import asyncio, sys
from pathlib import Path
from actors.engine import make_engine
from tests.engine_fixtures import settings_for

async def main():
    await make_engine(settings_for(Path(sys.argv[1]), kind="async")).start()
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_engine_process_ends_with_its_owner(model_path: Path, tmp_path: Path) -> None:
    """F-32: nothing is left behind when the owner has no time to say goodbye."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    root = str(Path(__file__).parents[1])
    owner = subprocess.Popen(
        [sys.executable, str(script), str(model_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": root},
    )
    try:
        assert owner.stdout is not None
        assert any("started" in line for line in owner.stdout)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert any("EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline()) for child in children)
    finally:
        owner.kill()
        owner.wait()
    deadline = time.monotonic() + 60
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < deadline, "the engine's processes outlived their owner"
        time.sleep(0.1)
