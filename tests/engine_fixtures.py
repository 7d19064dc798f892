"""Tiny models, publications and reference log-probs for the tests that run vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from actors.engine import Engine, EngineSettings, GenerationRequest
from common.weights import Canary, TensorSpec, WeightManifest

T = TypeVar("T")

VOCAB_SIZE = 128
MAX_MODEL_LEN = 384
CANARY_IDS = tuple(range(3, 27))


class Loop:
    """One event loop for all calls of a test module: an engine belongs to the loop that started it."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 240))

    def close(self) -> None:
        self._runner.close()


def tiny_model(*, tied: bool, seed: int = 0, family: str = "qwen2", eos_token_id: int | None = None) -> PreTrainedModel:
    """0.3 M parameters, float32. Wide initialisation and random biases: any stale tensor moves log-probs by nats."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen2":
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    return randomize(model.float().eval(), seed)


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.5 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.copy_(0.35 * noise)
        else:
            parameter.copy_(2.0 / math.sqrt(parameter.shape[1]) * noise)
    return model


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """[n - 1], of each token after the first, from a plain forward pass."""
    ids = torch.tensor([list(token_ids)])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def write_publication(
    path: Path,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    canary: Canary,
) -> WeightManifest:
    """Raw tensors one after the other, as the learner's publisher writes them."""
    specs, chunks, offset = [], [], 0
    for name, tensor in named_tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, offset=offset)
        chunks.append(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        specs.append(spec)
        offset += spec.size_bytes
    data = b"".join(chunks)
    path.write_bytes(data)
    return WeightManifest(
        version=version,
        path=str(path),
        size_bytes=len(data),
        digest=blake3(data).hexdigest(),
        tensors=tuple(specs),
        canary=canary,
    )


def canary_of(model: PreTrainedModel) -> Canary:
    return Canary(token_ids=CANARY_IDS, logprobs=tuple(map(float, reference_logprobs(model, CANARY_IDS))))


def publish(model: PreTrainedModel, version: int, folder: Path) -> WeightManifest:
    return write_publication(folder / f"weights_{version}.bin", model.named_parameters(), version, canary_of(model))


def settings_for(model_path: Path, kind: str = "in_process", **overrides: Any) -> EngineSettings:
    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "kind": kind,
        "device": "cpu",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "kv_cache_bytes": 64 * 2**20,
    }
    return EngineSettings(**(arguments | overrides))


def request(prompt_ids: Sequence[int], **overrides: Any) -> GenerationRequest:
    arguments: dict[str, Any] = {
        "request_id": "test",
        "prompt_ids": prompt_ids,
        "max_new_tokens": 32,
        "temperature": 1.0,
        "seed": 0,
    }
    return GenerationRequest(**(arguments | overrides))


class HeldCanary:
    """The engine's next canary is answered to it only when `may_pass` is set. Leave by `release`."""

    def __init__(self, engine: Engine) -> None:
        self.resumed = asyncio.Event()  # the new weights serve
        self.generated = asyncio.Event()  # vLLM has finished a generation
        self.may_pass = asyncio.Event()
        self._driver: Any = engine._driver  # type: ignore[attr-defined]
        self._switch, self._generate = self._driver.switch_weights, self._driver.generate
        self._driver.switch_weights, self._driver.generate = self._held_switch, self._watched_generate

    def release(self) -> None:
        self.may_pass.set()
        del self._driver.switch_weights, self._driver.generate

    async def _held_switch(self, *arguments: Any) -> Any:
        stall_s, canary = await self._switch(*arguments)
        self.resumed.set()

        async def held() -> Any:
            output = await canary
            await self.may_pass.wait()
            return output

        return stall_s, held()

    async def _watched_generate(self, *arguments: Any) -> Any:
        output = await self._generate(*arguments)
        self.generated.set()
        return output
