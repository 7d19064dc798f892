"""Tiny models, batches and configurations for the learner's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from common.config import RunConfig
from common.config_load import load_config
from common.types import FinishReason, GroupId, LeaseId, SampleId, Trajectory, Turn
from learner.recipes import recipe_settings

VOCAB_SIZE = 300


def save_model(folder: Path, *, family: str = "llama", tied: bool = False, seed: int = 0, **changes: Any) -> Path:
    """A random model of 2 layers, hidden size 32; wide initialisation, so that its log-probs differ by nats."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **changes,
    }
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**shape)) if family == "qwen2" else LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(folder)
    return folder


def make_config(recipe: str, *overrides: str) -> RunConfig:
    """`overrides` are words of the command line; the value function warms up for no batch unless they say so."""
    settings = recipe_settings()
    warmup = ["value.warmup_batches=0"] if "value.warmup_batches" in settings[recipe] else []
    words = [f"recipe={recipe}", "learner.device=cpu", "learner.learning_rate=1e-3", *warmup, *overrides]
    return load_config(None, words, recipes=settings)


def trajectory(
    token_ids: Sequence[int],
    mask: Sequence[int],
    *,
    rollout_logprobs: Sequence[float] | float = -1.0,
    versions: Sequence[int] | int = 0,
    turn_rewards: Sequence[float] = (),
    finish_reason: FinishReason = FinishReason.STOP,
    **changes: Any,
) -> Trajectory:
    """A trajectory whose turns are the runs of 1 in `mask`."""
    loss_mask = np.array(mask, np.bool_)
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    spans = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    rewards = turn_rewards or [0.0] * len(spans)
    fields: dict[str, Any] = {
        "sample_id": SampleId(0),
        "lease_id": LeaseId(0),
        "group_id": GroupId(0),
        "prompt_id": "kit/0",
        "epoch": 0,
        "attempt": 0,
        "temperature": 1.0,
        "reward": 1.0,
        **changes,
    }
    return Trajectory(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=loss_mask,
        rollout_logprobs=np.where(loss_mask, np.asarray(rollout_logprobs, np.float32), np.float32(0)),
        weight_versions=np.where(loss_mask, np.asarray(versions, np.int32), np.int32(-1)),
        turns=tuple(
            Turn(start=start, stop=stop, finish_reason=finish_reason, reward=reward)
            for (start, stop), reward in zip(spans, rewards, strict=True)
        ),
        finish_reason=finish_reason,
        **fields,
    )


def random_batch(
    rng: Generator, model: PreTrainedModel, *, size: int = 8, group_size: int = 1, noise: float = 0.6, version: int = 6
) -> list[Trajectory]:
    """Ragged trajectories of two turns with an observation between them, some cut at a length limit.

    Their log-probs are the model's at the trajectory's temperature plus noise, so that some ratios are outside any
    band; their tokens come from weight versions up to 6 behind `version`.
    """
    batch = []
    for index in range(size):
        pieces = [rng.integers(1, high) for high in (6, 7, 4, 5)]  # prompt, turn, observation, turn
        mask = np.repeat([0, 1, 0, 1], pieces)
        ids = rng.integers(0, VOCAB_SIZE, len(mask))
        temperature = float(rng.choice([0.7, 1.0, 1.4]))
        exact = model_logprobs(model, ids, temperature)
        recorded = np.minimum(exact + rng.normal(0, noise, len(mask)), -1e-3)
        batch.append(
            trajectory(
                ids.tolist(),
                mask.tolist(),
                rollout_logprobs=recorded.tolist(),
                versions=np.sort(rng.integers(version - 6, version + 1, len(mask))).tolist(),
                turn_rewards=(0.25, 0.0) if index % 3 == 0 else (0.0, 0.0),
                finish_reason=FinishReason.LENGTH if index % 4 == 1 else FinishReason.STOP,
                sample_id=SampleId(index),
                group_id=GroupId(index // group_size),
                prompt_id=f"kit/{index // group_size}",
                temperature=temperature,
                reward=float(rng.normal()),
            )
        )
    return batch


@torch.no_grad()
def model_logprobs(model: PreTrainedModel, ids: Any, temperature: float = 1.0) -> Any:
    """[T] float64; of each token given those before it; 0 for the first."""
    tokens = torch.as_tensor(np.asarray(ids, np.int64))
    logits = model(input_ids=tokens[None]).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
    return np.concatenate([[0.0], logprobs.numpy()])


def with_recorded(batch: Sequence[Trajectory], model: PreTrainedModel, shift: float = 0.0) -> list[Trajectory]:
    """The same trajectories as if `model` had sampled them, every log-prob moved by `shift`."""
    return [
        dataclasses.replace(
            t,
            rollout_logprobs=np.where(
                t.loss_mask, model_logprobs(model, t.token_ids, t.temperature) + shift, 0.0
            ).astype(np.float32),
        )
        for t in batch
    ]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


MakeModel = Callable[..., Path]
