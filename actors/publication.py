"""What the engine's model expects of a publication, and the check of one before anything of it is loaded."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from common.errors import ModelError, PublicationGoneError, WeightUpdateError
from common.safetensors_header import shapes_in_header
from common.weights import ITEM_BYTES, TensorSpec, WeightManifest

TIED_HEAD = "lm_head.weight"
EMBEDDING_SUFFIX = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of a model folder, without their values."""

    path: str
    shapes: Mapping[str, tuple[int, ...]]  # what a publication must hold, by checkpoint name
    vocab_size: int
    tied_embedding: str | None  # name of the embedding that is the output head too

    def size_bytes(self, dtype: str) -> int:
        """Bytes of all parameters in `dtype`."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * ITEM_BYTES[dtype]


def read_checkpoint(model_path: str) -> Checkpoint:
    """Names and shapes from the headers of the safetensors files in `model_path`.

    Raises:
        ModelError: folder, config.json or safetensors files are missing or unreadable.
    """
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model folder {model_path} has no config.json; give a folder made by save_pretrained")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model folder {model_path} has no *.safetensors file; save the model in that format")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        config = json.loads((folder / "config.json").read_text())
        for file in files:
            shapes |= shapes_in_header(file)
        vocab_size = int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model folder {model_path} cannot be read: {error!r}") from error

    embedding = next((name for name in shapes if name.endswith(EMBEDDING_SUFFIX)), None)
    # A checkpoint may carry the tied head a second time; vLLM then ties it again, and a learner does not send it.
    if embedding is not None and (TIED_HEAD not in shapes or config.get("tie_word_embeddings")):
        shapes.pop(TIED_HEAD, None)
    else:
        embedding = None
    return Checkpoint(path=model_path, shapes=shapes, vocab_size=vocab_size, tied_embedding=embedding)


def check_contents(manifest: WeightManifest, checkpoint: Checkpoint, dtype: str, max_model_len: int) -> None:
    """Names, shapes, dtypes, layout and canary of a publication.

    Raises:
        WeightUpdateError: naming what is missing, unknown, malformed or cannot be checked.
    """
    version = manifest.version
    names = [spec.name for spec in manifest.tensors]
    known = set(checkpoint.shapes) | ({TIED_HEAD} if checkpoint.tied_embedding else set())
    if unknown := [name for name in names if name not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise WeightUpdateError(f"version {version}: {_listed(unknown)} not in the model at {checkpoint.path}{hint}")
    if missing := sorted(set(checkpoint.shapes) - set(names)):
        raise WeightUpdateError(
            f"version {version}: {_listed(missing)} missing; a publication must hold the whole model"
        )
    if len(set(names)) != len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise WeightUpdateError(f"version {version}: {_listed(repeated)} given more than once")

    end = 0
    for spec in manifest.tensors:
        name = checkpoint.tied_embedding if spec.name == TIED_HEAD and checkpoint.tied_embedding else spec.name
        if spec.shape != checkpoint.shapes[name]:
            raise WeightUpdateError(
                f"version {version}: {spec.name!r} has shape {spec.shape}, the model has {checkpoint.shapes[name]}"
            )
        if spec.dtype != dtype:
            raise WeightUpdateError(
                f"version {version}: {spec.name!r} is {spec.dtype}, the engine computes in {dtype}; publish in {dtype}"
            )
        if spec.offset < end or spec.offset % ITEM_BYTES[dtype]:
            raise WeightUpdateError(f"version {version}: {spec.name!r} is misplaced at offset {spec.offset}")
        end = spec.offset + spec.size_bytes
    if end > manifest.size_bytes:
        raise WeightUpdateError(f"version {version}: tensors end at byte {end} of {manifest.size_bytes}")
    _check_canary(manifest, checkpoint, max_model_len)


@contextlib.contextmanager
def checked_file(manifest: WeightManifest, checkpoint: Checkpoint) -> Iterator[str]:
    """Check size and digest of the file at `manifest.path`, whose contents have been checked.

    Yields a path by which every process of this user and node opens these very bytes, until the context is left: the
    learner may have replaced or removed the file under its name in the meantime.

    Raises:
        PublicationGoneError: the file is missing.
        WeightUpdateError: the file is truncated, altered, or holds a tied head unlike its embedding.
    """
    try:
        file = open(manifest.path, "rb")  # noqa: SIM115 - closed by whoever leaves this context
    except FileNotFoundError as error:
        raise PublicationGoneError(f"version {manifest.version}: {manifest.path} is gone") from error
    except OSError as error:
        raise WeightUpdateError(f"version {manifest.version}: {manifest.path} cannot be read: {error}") from error
    with file:
        _check_bytes(file.fileno(), manifest, checkpoint)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _check_bytes(fileno: int, manifest: WeightManifest, checkpoint: Checkpoint) -> None:
    version, path = manifest.version, manifest.path
    if (size := os.fstat(fileno).st_size) != manifest.size_bytes or not size:
        raise WeightUpdateError(f"version {version}: {path} has {size} bytes of {manifest.size_bytes}")
    with mmap.mmap(fileno, 0, access=mmap.ACCESS_READ) as data:
        if (digest := blake3(data).hexdigest()) != manifest.digest:
            raise WeightUpdateError(
                f"version {version}: {path} has digest {digest[:16]}…, announced was {manifest.digest[:16]}…"
            )
        specs = {spec.name: spec for spec in manifest.tensors}
        embedding = checkpoint.tied_embedding
        if embedding and TIED_HEAD in specs and not _equal_bytes(data, specs[TIED_HEAD], specs[embedding]):
            raise WeightUpdateError(
                f"version {version}: {TIED_HEAD!r} differs from {embedding!r}, to which the model ties it"
            )


def _check_canary(manifest: WeightManifest, checkpoint: Checkpoint, max_model_len: int) -> None:
    version, canary = manifest.version, manifest.canary
    n = len(canary.token_ids)
    if not 2 <= n < max_model_len or len(canary.logprobs) != n - 1:
        raise WeightUpdateError(
            f"version {version}: canary of {n} tokens and {len(canary.logprobs)} log-probs; needs 2 to "
            f"{max_model_len - 1} tokens and one log-prob less"
        )
    if not all(0 <= token < checkpoint.vocab_size for token in canary.token_ids):
        raise WeightUpdateError(f"version {version}: canary has a token outside the vocabulary {checkpoint.vocab_size}")
    if not all(map(math.isfinite, canary.logprobs)):
        raise WeightUpdateError(f"version {version}: canary log-probs are not finite; the learner's weights are broken")


def _equal_bytes(data: mmap.mmap, first: TensorSpec, second: TensorSpec) -> bool:
    a, b = (np.frombuffer(data, np.uint8, spec.size_bytes, spec.offset) for spec in (first, second))
    return bool(np.array_equal(a, b))


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
