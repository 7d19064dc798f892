"""The engine with vLLM under it, both kinds: log-probs, seeds, versions and weight updates."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from actors.engine import Engine, Generation, GenerationRequest, WeightUpdate, make_engine
from common.errors import ConfigError, WeightUpdateError
from common.types import FinishReason
from common.weights import WeightManifest
from tests.engine_fixtures import (
    CANARY_IDS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    HeldCanary,
    Loop,
    canary_of,
    publish,
    randomize,
    reference_logprobs,
    request,
    settings_for,
    tiny_model,
    write_publication,
)

pytestmark = pytest.mark.engine

ATOL = 1e-4  # nats; a stale tensor moves log-probs by several


@dataclasses.dataclass
class Served:
    """A running engine and the model it should hold."""

    kind: str
    tied: bool
    engine: Engine
    model: PreTrainedModel
    folder: Path
    loop: Loop

    def publish(self, model: PreTrainedModel) -> WeightManifest:
        return publish(model, self.engine.weight_version + 1, self.folder)

    def push(self, model: PreTrainedModel) -> WeightUpdate:
        update = self.loop(self.engine.load_weights(self.publish(model)))
        self.model = model
        return update

    def generate(self, *requests: GenerationRequest) -> list[Generation]:
        async def together() -> list[Generation]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.loop(together())

    def score_error(self, model: PreTrainedModel) -> float:
        ids = CANARY_IDS[::-1] + CANARY_IDS
        return float(np.abs(self.loop(self.engine.score(ids)) - reference_logprobs(model, ids)).max())


@pytest.fixture(
    scope="module",
    params=[("in_process", "qwen2", True), ("in_process", "llama", False), ("async", "qwen2", True)],
    ids=["in-process-tied", "in-process-untied", "async-tied"],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, family, tied = request.param
    folder = tmp_path_factory.mktemp("engine")
    model = tiny_model(tied=tied, family=family)
    model.save_pretrained(folder / "model")
    loop = Loop()
    engine = make_engine(settings_for(folder / "model", kind=kind))
    loop(engine.start())
    yield Served(kind, tied, engine, model, folder, loop)
    loop(engine.close())
    loop.close()


def full_ids(asked: GenerationRequest, generation: Generation) -> list[int]:
    return [*asked.prompt_ids, *map(int, generation.token_ids)]


def errors_against(model: PreTrainedModel, asked: GenerationRequest, generation: Generation) -> np.ndarray:
    reference = reference_logprobs(model, full_ids(asked, generation), asked.temperature)
    return np.abs(reference[len(asked.prompt_ids) - 1 :] - generation.logprobs)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_distribution_sampled_from(served: Served, temperature: float) -> None:
    """F-08."""
    asked = [request([i, 7, 3 * i], seed=i, temperature=temperature) for i in range(8)]
    for one, generation in zip(asked, served.generate(*asked), strict=True):
        assert errors_against(served.model, one, generation).max() < ATOL
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.token_ids) == 32
        assert (generation.weight_versions == served.engine.weight_version).all()
        assert (generation.token_ids.dtype, generation.logprobs.dtype) == (np.int32, np.float32)


def test_score_is_the_models_log_softmax(served: Served) -> None:
    assert served.score_error(served.model) < ATOL


def test_temperature_zero_takes_the_most_likely_token(served: Served) -> None:
    (asked,) = [request([5, 6, 7], temperature=0.0)]
    (generation,) = served.generate(asked)
    with torch.no_grad():
        logits = served.model(torch.tensor([full_ids(asked, generation)])).logits[0, 2:-1]
    assert generation.token_ids.tolist() == logits.argmax(-1).tolist()


def test_seed_decides_the_tokens(served: Served) -> None:
    """F-31."""
    alone = served.generate(request([1, 2, 3], seed=11))[0]
    among_others = served.generate(*(request([1, 2, 3], seed=seed) for seed in (10, 11, 12)))
    assert among_others[1].token_ids.tolist() == alone.token_ids.tolist()
    assert len({tuple(generation.token_ids.tolist()) for generation in among_others}) == 3


def test_stop_token_ends_the_generation_and_is_part_of_it(served: Served) -> None:
    asked = request([1, 2, 3], seed=11)
    tokens = served.generate(asked)[0].token_ids.tolist()
    stop = tokens[9]
    asked = dataclasses.replace(asked, stop_token_ids=(stop,))
    (generation,) = served.generate(asked)
    assert generation.token_ids.tolist() == tokens[: tokens.index(stop) + 1]
    assert generation.finish_reason is FinishReason.STOP
    assert errors_against(served.model, asked, generation).max() < ATOL


def test_more_requests_than_slots_are_all_served(served: Served) -> None:
    asked = [request([i, i + 1], seed=i, max_new_tokens=8 + i) for i in range(32)]
    generations = served.generate(*asked)
    assert [len(generation.token_ids) for generation in generations] == [8 + i for i in range(32)]
    for one, generation in zip(asked, generations, strict=True):
        assert errors_against(served.model, one, generation).max() < ATOL


def test_prompts_beyond_one_steps_budget_keep_their_seeds(served: Served) -> None:
    """F-31. 16 prompts of 200 tokens are more than the 2048 that vLLM computes in one step."""
    asked = [request([(i * j) % VOCAB_SIZE for j in range(1, 201)], seed=i, max_new_tokens=8) for i in range(1, 17)]
    together = served.generate(*asked)
    for one, generation in zip(asked, together, strict=True):
        assert errors_against(served.model, one, generation).max() < ATOL
    alone = [served.generate(one)[0] for one in asked]
    assert [g.token_ids.tolist() for g in together] == [g.token_ids.tolist() for g in alone]


def test_requests_that_do_not_fit_are_refused_and_the_engine_goes_on(served: Served) -> None:
    for bad in (
        request([]),
        request([1], max_new_tokens=0),
        request([1] * MAX_MODEL_LEN, max_new_tokens=1),
        request([1, VOCAB_SIZE]),
        request([-1]),
        request([1], temperature=-1.0),
        request([1], stop_token_ids=(VOCAB_SIZE + 7,)),
    ):
        with pytest.raises(ValueError, match="request test"):
            served.generate(bad)
    for ids in ([1], [1] * MAX_MODEL_LEN, [1, VOCAB_SIZE]):
        with pytest.raises(ValueError, match="score"):
            served.loop(served.engine.score(ids))
    assert len(served.generate(request([1] * (MAX_MODEL_LEN - 1), max_new_tokens=1))[0].token_ids) == 1


def test_round_trip_of_weights(served: Served) -> None:
    """F-01 (b): W, then W + 0.1, then W; the third result equals the first."""
    first, greedy = served.model, request([4, 5, 6], temperature=0.0)
    moved = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.1)
    scores, generations = [], []
    for model in (first, moved, first):
        version = served.engine.weight_version
        update = served.push(model)
        assert update.version == served.engine.weight_version == version + 1
        assert update.canary_error < ATOL
        assert served.score_error(model) < ATOL
        scores.append(served.loop(served.engine.score(CANARY_IDS)))
        generations.append(served.generate(greedy)[0])
        assert (generations[-1].weight_versions == version + 1).all()
    assert np.array_equal(scores[0], scores[2])
    assert generations[0].token_ids.tolist() == generations[2].token_ids.tolist()
    assert np.abs(scores[0] - scores[1]).max() > 1  # the second push did change the policy


def test_both_uses_of_the_embedding_are_renewed_without_a_warning(served: Served) -> None:
    """F-02: tied, and untied with the head moved by another amount; tied with the redundant entry."""
    moved = copy.deepcopy(served.model)
    with torch.no_grad():
        moved.get_input_embeddings().weight.add_(0.1)
        if not served.tied:
            moved.get_output_embeddings().weight.add_(0.2)
    tensors = dict(moved.named_parameters())
    assert ("lm_head.weight" in tensors) is not served.tied
    tensors["lm_head.weight"] = moved.get_output_embeddings().weight
    manifest = write_publication(
        served.folder / "w.bin", tensors.items(), served.engine.weight_version + 1, canary_of(moved)
    )

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    vllm_logger = logging.getLogger("vllm")
    level = vllm_logger.level
    vllm_logger.addHandler(handler)
    vllm_logger.setLevel(logging.WARNING)
    try:
        served.loop(served.engine.load_weights(manifest))
    finally:
        vllm_logger.removeHandler(handler)
        vllm_logger.setLevel(level)
    served.model = moved
    assert served.score_error(moved) < ATOL
    assert [record.getMessage() for record in records] == []


def test_messages_that_are_not_whole_are_refused_and_the_old_weights_serve(served: Served) -> None:
    """F-02: misspelt extra name; F-01: a part, a damaged file."""
    version = served.engine.weight_version
    other = randomize(copy.deepcopy(served.model), 99)
    good = served.publish(other)
    norm = "model.norm.weight"
    tensors = [(name, tensor) for name, tensor in other.named_parameters() if name != norm]
    damaged = Path(good.path).with_name("damaged.bin")
    data = bytearray(Path(good.path).read_bytes())
    data[1000] ^= 1
    damaged.write_bytes(data)

    def written(name: str, extra: list[tuple[str, torch.Tensor]]) -> WeightManifest:
        return write_publication(served.folder / name, tensors + extra, version + 1, good.canary)

    cases = {
        norm: written("partial.bin", []),
        "model.norm.weihgt": written("misspelt.bin", [(norm, torch.ones(128)), ("model.norm.weihgt", torch.ones(128))]),
        "shape": written("shape.bin", [(norm, torch.ones(64))]),
        "bfloat16": written("dtype.bin", [(norm, torch.ones(128, dtype=torch.bfloat16))]),
        "digest": dataclasses.replace(good, path=str(damaged)),
        "is gone": dataclasses.replace(good, path="/dev/shm/no-such-publication"),
        "older": dataclasses.replace(good, version=version - 1),
    }
    if version == 0:
        del cases["older"]
    for message, manifest in cases.items():
        with pytest.raises(WeightUpdateError, match=message):
            served.loop(served.engine.load_weights(manifest))
    assert served.engine.weight_version == version
    assert served.score_error(served.model) < ATOL
    served.push(other)
    assert served.score_error(other) < ATOL


def test_prefix_cache_is_not_used_across_versions(served: Served) -> None:
    """F-03, also between two members of one group."""
    prompt = [(7 * i) % VOCAB_SIZE for i in range(100)]  # 3 whole blocks of 32
    served.push(randomize(copy.deepcopy(served.model), 5))
    members = [request(prompt, seed=seed, max_new_tokens=2) for seed in range(4)]
    assert served.generate(members[0])[0].num_cached_tokens == 0
    assert served.generate(members[1])[0].num_cached_tokens == 96
    served.push(randomize(copy.deepcopy(served.model), 6))
    (third,) = served.generate(members[2])
    assert third.num_cached_tokens == 0
    assert errors_against(served.model, members[2], third).max() < ATOL
    assert served.generate(members[3])[0].num_cached_tokens == 96


def test_update_in_flight_splits_generations_exactly(served: Served) -> None:
    """F-04: k tokens of the old version, the rest of the new; each from its own policy on the whole prefix."""
    old, new = served.model, randomize(copy.deepcopy(served.model), 21)
    version = served.engine.weight_version
    asked = [request([i, 9, 2 * i], seed=i, temperature=0.7, max_new_tokens=300) for i in range(8)]

    async def update_midway() -> list[Generation]:
        running = [asyncio.ensure_future(served.engine.generate(one)) for one in asked]
        await served.engine.generate(request([3], max_new_tokens=20))  # by then the others are about as far
        await served.engine.load_weights(served.publish(new))
        return await asyncio.gather(*running)

    generations = served.loop(update_midway())
    served.model = new
    for one, generation in zip(asked, generations, strict=True):
        k = int((generation.weight_versions == version).sum())
        assert 0 < k < 300
        assert generation.weight_versions.tolist() == [version] * k + [version + 1] * (300 - k)
        from_old, from_new = errors_against(old, one, generation), errors_against(new, one, generation)
        assert from_old[:k].max() < ATOL
        assert from_new[k:].max() < ATOL
        assert from_old[k:].max() > 1
        assert from_new[:k].max() > 1


def test_tokens_are_withheld_until_the_canary_passes(served: Served) -> None:
    version = served.engine.weight_version
    manifest = served.publish(served.model)

    async def load_with_a_slow_canary() -> Generation:
        canary = HeldCanary(served.engine)
        try:
            load = asyncio.ensure_future(served.engine.load_weights(manifest))
            await canary.resumed.wait()
            generation = asyncio.ensure_future(served.engine.generate(request([1, 2], max_new_tokens=4)))
            await canary.generated.wait()
            await asyncio.sleep(0.05)
            assert not generation.done()
            assert served.engine.weight_version == version
        finally:
            canary.release()
        await load
        return await generation

    generation = served.loop(load_with_a_slow_canary())
    assert generation.weight_versions.tolist() == [version + 1] * 4


def test_updates_are_served_one_after_the_other(served: Served) -> None:
    version = served.engine.weight_version
    models = [randomize(copy.deepcopy(served.model), seed) for seed in (31, 32)]
    manifests = [publish(model, version + i, served.folder) for i, model in enumerate(models, 1)]

    async def both() -> list[WeightUpdate]:
        return await asyncio.gather(*map(served.engine.load_weights, manifests))

    assert [update.version for update in served.loop(both())] == [version + 1, version + 2]
    served.model = models[1]
    assert served.score_error(models[1]) < ATOL


def test_same_version_may_be_loaded_again(served: Served) -> None:
    version = served.engine.weight_version
    assert served.loop(served.engine.load_weights(publish(served.model, version, served.folder))).version == version
    assert served.score_error(served.model) < ATOL


def test_load_goes_on_when_its_caller_is_cancelled(served: Served) -> None:
    version = served.engine.weight_version
    new = randomize(copy.deepcopy(served.model), 41)
    manifest = served.publish(new)

    async def give_up() -> None:
        task = asyncio.ensure_future(served.engine.load_weights(manifest))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.engine.score([1, 2])  # waits for the update

    served.loop(give_up())
    served.model = new
    assert served.engine.weight_version == version + 1
    assert served.score_error(new) < ATOL


def test_shared_memory_needs_no_connection(served: Served) -> None:
    with pytest.raises(ConfigError, match="shared_memory"):
        served.loop(served.engine.connect_transport({}))


def test_cancelled_generation_is_aborted(served: Served) -> None:
    llm: Any = served.engine._driver._llm  # type: ignore[attr-defined]

    async def cancel_one_of_two() -> Generation:
        cancelled, kept = (
            asyncio.ensure_future(served.engine.generate(request([i], max_new_tokens=300))) for i in (1, 2)
        )
        await served.engine.generate(request([3], max_new_tokens=4))
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await served.engine.generate(request([3], max_new_tokens=4))
        assert llm.output_processor.get_num_unfinished_requests() == 1
        return await kept

    assert len(served.loop(cancel_one_of_two()).token_ids) == 300
