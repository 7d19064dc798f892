"""How much memory a run takes, worked out from shapes before anything is loaded. Rough where it says so."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from actors.publication import read_checkpoint
from buffer.build import replay_settings
from common.algorithm_config import needs_starting_model, updates_per_batch
from common.config import RunConfig
from common.errors import ModelError
from common.weights import ITEM_BYTES
from learner.model_cache import default_cache_dir
from learner.models import SMOLLM2, TINY_SORT, has_chat_template, resolve_model
from learner.smollm2 import check_smollm2

FLOAT = 4  # bytes of the learner's weights, gradients and moments
KEPT_PUBLICATIONS = 3  # the newest two, and the one that is being written
# Resident memory of a process before the model, measured on CPU: imports of vLLM, or of torch and transformers.
ENGINE_BASE, LEARNER_BASE, OTHER_BASE = 780 * 2**20, 600 * 2**20, 1000 * 2**20  # other: Ray, buffer, this process
ACTIVATION_BYTES = 68  # a token, a layer, a unit of width: what backward keeps of a decoder layer, in float32
LOGIT_COPIES = 3  # logits, their log-softmax, and its gradient

ATTENTION = re.compile(r"\.(self_attn|attn|attention|self_attention|linear_attn|mixer)\.")
EMBEDDING = re.compile(r"\.(embed_tokens|wte|word_embeddings)\.")
HEAD = re.compile(r"^(lm_head|output|embed_out)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Sizes of a model."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]  # by checkpoint name
    num_layers: int
    hidden_size: int
    vocab_size: int
    kv_width: int  # numbers that one layer keeps of a token, keys and values together
    note: str = ""  # how the model is made, where it is not simply read
    has_chat_template: bool = False

    @property
    def num_parameters(self) -> int:
        return count(self.shapes)

    def num_trained(self, trainable_layers: int | None) -> int:
        """Parameters of the last layers, or all."""
        if trainable_layers is None:
            return self.num_parameters
        first = self.num_layers - trainable_layers
        return count({name: shape for name, shape in self.shapes.items() if layer_of(name) >= first})

    def value_model(self, *, freeze_attention: bool) -> tuple[int, int]:
        """Parameters, and trained ones, of a value model of its own."""
        trunk = {name: shape for name, shape in self.shapes.items() if not HEAD.search(name)}
        trained = {n: s for n, s in trunk.items() if not (ATTENTION.search(n) or EMBEDDING.search(n))}
        head = self.hidden_size + 1
        return count(trunk) + head, count(trained if freeze_attention else trunk) + head


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes, by what they are for."""

    learner: Mapping[str, int]
    engine: Mapping[str, int]  # of one actor
    publications: int  # in `weights.folder`
    buffer: int  # held trajectories at the admission limit, each of the greatest length


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is."""

    num_cpus: int
    num_gpus: int
    memory: int  # bytes that processes can take
    folder_free: int | None  # of weights.folder; none when it does not exist

    @classmethod
    def look(cls, config: RunConfig) -> Machine:
        folder = Path(config.weights.folder)
        return cls(
            num_cpus=len(os.sched_getaffinity(0)),
            num_gpus=count_gpus(),
            memory=available_memory(),
            folder_free=shutil.disk_usage(folder).free if folder.is_dir() else None,
        )


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes can still take: of the machine, or of the container if that allows less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is no limit
        return min(free, max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        return free


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def layer_of(name: str) -> int:
    """Number of the decoder layer that a tensor belongs to; -1 for none."""
    match = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
    return int(match.group(1)) if match else -1


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, found without loading anything."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
    if visible is None:
        return devices
    named = [part for part in visible.split(",") if part.strip() not in ("", "-1")]
    return min(devices, len(named))


def model_facts(path: str, cache_dir: Path | None = None) -> ModelFacts:
    """Sizes from a model's config and the headers of its weights, or those that a built-in model will have.

    Raises:
        ModelError: `path` is neither a model folder nor a model that can be made here.
    """
    cache = cache_dir or default_cache_dir()
    if path == TINY_SORT:
        note = f"made once for each seed, in one or two minutes, and kept in {cache}"
        return _decoder(path, note, layers=2, hidden=128, mlp=256, kv=64, vocab=258, biases=True)
    if path == SMOLLM2:
        check_smollm2(cache)
        note = f"converted once from its Python package, in about half a minute, and kept in {cache}"
        return _decoder(path, note, layers=30, hidden=576, mlp=1536, kv=192, vocab=49152)
    return _from_folder(resolve_model(path, seed=0, cache_dir=cache, report=lambda _: None), path)


def estimate(config: RunConfig, model: ModelFacts) -> Memory:
    """Memory of each process.

    Args:
        config: with every `auto` decided.
    """
    learner, engine, total = config.learner, config.engine, model.num_parameters
    trained = model.num_trained(learner.trainable_layers)
    tokens = min(max(learner.micro_batch_tokens, config.rollout.max_tokens), batch_tokens(config))
    at_once = min(learner.logprob_chunk_tokens, tokens)
    parts = {
        "policy weights": FLOAT * total,
        "policy gradients and AdamW": 3 * FLOAT * trained,
        "activations of a micro-batch (rough)": ACTIVATION_BYTES * tokens * model.num_layers * model.hidden_size,
        "logits": LOGIT_COPIES * FLOAT * at_once * model.vocab_size,
    }
    if config.algorithm.value == "own_model":
        size, value_trained = model.value_model(freeze_attention=config.value.freeze_attention)
        parts["value model with gradients and AdamW"] = FLOAT * size + 3 * FLOAT * value_trained
    if needs_starting_model(config.algorithm):
        parts["starting model"] = FLOAT * total
    if updates_per_batch(config.algorithm) > 1:
        parts["policy before the batch, for an undo"] = 3 * FLOAT * trained
    if learner.device == "cpu":
        parts["process"] = LEARNER_BASE
    served = ITEM_BYTES[config.model.dtype] * total
    engine_parts = {"weights": served // engine.tensor_parallel_size}
    if engine.device == "cpu":
        engine_parts |= {"KV cache": engine.kv_cache_mib * 2**20, "process": ENGINE_BASE}
    settings = replay_settings(config)
    return Memory(
        learner=parts,
        engine=engine_parts,
        publications=KEPT_PUBLICATIONS * served,
        buffer=settings.admission_limit * settings.longest_trajectory_bytes,
    )


def batch_tokens(config: RunConfig) -> int:
    """Of a batch at most."""
    return config.buffer.batch_size * config.rollout.max_tokens


def kv_tokens(config: RunConfig, model: ModelFacts) -> int:
    """Tokens that one engine's KV cache on CPU can hold."""
    a_token = ITEM_BYTES[config.model.dtype] * model.num_layers * model.kv_width
    return config.engine.kv_cache_mib * 2**20 // a_token


def _from_folder(folder: Path, name: str) -> ModelFacts:
    checkpoint = read_checkpoint(str(folder))
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {**settings, **settings.get("text_config", {})}
        heads = settings["num_attention_heads"]
        head_size = settings.get("head_dim") or settings["hidden_size"] // heads
        return ModelFacts(
            name=name,
            shapes=checkpoint.shapes,
            num_layers=settings["num_hidden_layers"],
            hidden_size=settings["hidden_size"],
            vocab_size=checkpoint.vocab_size,
            kv_width=2 * head_size * (settings.get("num_key_value_heads") or heads),
            has_chat_template=has_chat_template(str(folder)),
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ModelError(f"model folder {folder}: config.json lacks what a plan needs: {error!r}") from None


def _decoder(
    name: str, note: str, *, layers: int, hidden: int, mlp: int, kv: int, vocab: int, biases: bool = False
) -> ModelFacts:
    """Shapes of a decoder with gated feed-forward layers, grouped queries and a tied head."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        start = f"model.layers.{layer}."
        for part, width in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{start}self_attn.{part}_proj.weight"] = (width, hidden)
            if biases:
                shapes[f"{start}self_attn.{part}_proj.bias"] = (width,)
        shapes[f"{start}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"{start}mlp.{part}_proj.weight": (mlp, hidden) for part in ("gate", "up")}
        shapes[f"{start}mlp.down_proj.weight"] = (hidden, mlp)
        shapes |= {f"{start}{part}.weight": (hidden,) for part in ("input_layernorm", "post_attention_layernorm")}
    return ModelFacts(
        name=name,
        shapes=shapes,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        kv_width=2 * kv,
        note=note,
        has_chat_template=has_chat_template(name),
    )
