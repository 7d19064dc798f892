"""Weights of one version out to the engines: a file in shared memory, and the manifest that says what is in it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from common.errors import ResourceError
from common.publications import publication_file, unfinished_file, unfinished_in, versions_in
from common.weights import ITEM_BYTES, Canary, TensorSpec, WeightManifest
from learner.policy import DTYPES, Policy
from learner.update import Learner

KEPT_FILES = 2  # an engine may still be reading the one before the newest
PIECE_BYTES = 1 << 18  # converted, hashed and written while it is in the processor's cache
CANARY_TOKENS = 24
CANARY_SEED = 20260708


@dataclass(frozen=True, slots=True)
class Written:
    """What a file holds."""

    size_bytes: int
    digest: str
    tensors: tuple[TensorSpec, ...]


class Publisher:
    """Writes publications to `folder`, as `<run>-v<version>.bin`.

    A file appears whole or not at all. The newest two stay; `close` removes them. What a killed learner of this run has
    published counts as this one's: engines that have yet to load it find it until newer files are out.

    Args:
        folder: in memory (`/dev/shm`) where learner and engines share a node.
        run_name: distinguishes runs that share the folder.
        node_id: the node that holds the file.
    """

    def __init__(self, folder: Path, run_name: str, node_id: str = "") -> None:
        self._folder = folder
        self._run_name = run_name
        self._node_id = node_id
        for path in unfinished_in(folder, run_name):  # a run has one learner at a time
            path.unlink(missing_ok=True)
        self._files = [path for _, path in sorted(versions_in(folder, run_name).items())]
        self._canary_ids: tuple[int, ...] = ()

    def publish(self, version: int, learner: Learner) -> WeightManifest:
        """Write the policy's weights in the served precision; versions may be published again.

        Raises:
            ResourceError: the folder is missing, not writable or too small; nothing has been written.
        """
        dtype = learner.config.model.dtype
        weights = learner.policy.checkpoint_weights()
        path = publication_file(self._folder, self._run_name, version)
        self._require_space(sum(weight.numel() for weight in weights.values()) * ITEM_BYTES[dtype])
        written = self._write(path, weights, dtype)
        self._retire(path)
        return WeightManifest(
            version=version,
            path=str(path),
            size_bytes=written.size_bytes,
            digest=written.digest,
            tensors=written.tensors,
            canary=self._canary(learner.policy, dtype, learner.config.rollout.max_tokens - 1),
            node_id=self._node_id,
        )

    def close(self) -> None:
        """Remove this run's publications. Engines that have a file open keep its contents."""
        while self._files:
            self._files.pop().unlink(missing_ok=True)

    def _require_space(self, needed_bytes: int) -> None:
        try:
            status = os.statvfs(self._folder)
        except OSError as error:
            raise self._no_folder(error) from error
        free_bytes = status.f_bavail * status.f_frsize
        if needed_bytes > free_bytes:
            raise self._no_space(needed_bytes, free_bytes)

    def _no_folder(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"weights.folder = {str(self._folder)!r} cannot be written to ({error.strerror}): name another folder"
        )

    def _no_space(self, needed_bytes: int, free_bytes: int) -> ResourceError:
        return ResourceError(
            f"weights.folder = {str(self._folder)!r} has {free_bytes:,} bytes free, and a publication needs "
            f"{needed_bytes:,}: make room (in a container, enlarge /dev/shm) or name another folder"
        )

    def _write(self, path: Path, weights: Mapping[str, Tensor], dtype: str) -> Written:
        aside = unfinished_file(path)
        try:
            with aside.open("wb", buffering=0) as file:
                written = write_tensors(file, weights.items(), dtype)
            aside.replace(path)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                status = os.statvfs(self._folder)
                raise self._no_space(
                    sum(weight.numel() for weight in weights.values()) * ITEM_BYTES[dtype],
                    status.f_bavail * status.f_frsize,
                ) from error
            raise self._no_folder(error) from error
        finally:
            aside.unlink(missing_ok=True)
        return written

    def _retire(self, newest: Path) -> None:
        self._files = [*(path for path in self._files if path != newest), newest]
        while len(self._files) > KEPT_FILES:
            self._files.pop(0).unlink(missing_ok=True)

    def _canary(self, policy: Policy, dtype: str, longest: int) -> Canary:
        if not self._canary_ids:
            ids = canary_token_ids(policy.vocab_size, special_token_ids(policy.folder))
            self._canary_ids = ids[:longest]  # one token of the engine's context is left for its answer
        logprobs = policy.served_logprobs(self._canary_ids, DTYPES[dtype])
        return Canary(token_ids=self._canary_ids, logprobs=tuple(logprobs))


def write_tensors(file: IO[bytes], weights: Iterable[tuple[str, Tensor]], dtype: str) -> Written:
    """Raw little-endian tensors one after the other.

    One pass over the weights: a piece is converted (if it must be), hashed and written before the next is read.
    """
    hasher = blake3()
    specs: list[TensorSpec] = []
    offset = 0
    pieces_of = PIECE_BYTES // ITEM_BYTES[dtype]
    for name, weight in weights:
        flat = weight.reshape(-1)
        if flat.device.type != "cpu":
            flat = flat.to(DTYPES[dtype]).cpu()  # converted before it travels
        for start in range(0, len(flat), pieces_of):
            data = _bytes_of(flat[start : start + pieces_of].to(DTYPES[dtype]))
            hasher.update(data)
            written = 0
            while written < len(data):  # an unbuffered write may be partial
                written += file.write(data[written:])
        specs.append(TensorSpec(name=name, shape=tuple(weight.shape), dtype=dtype, offset=offset))
        offset += specs[-1].size_bytes
    return Written(offset, hasher.hexdigest(), tuple(specs))


def _bytes_of(piece: Tensor) -> memoryview:
    """View of a contiguous one-dimensional tensor; numpy has no bfloat16, so that it goes by way of bytes."""
    return memoryview(piece.view(torch.uint8).numpy())  # type: ignore[arg-type]


def canary_token_ids(vocab_size: int, special: set[int]) -> tuple[int, ...]:
    """A fixed sequence of ordinary tokens, the same for every version and every start of a run."""
    ordinary = np.array([token for token in range(vocab_size) if token not in special], np.int64)
    if not ordinary.size:
        ordinary = np.arange(vocab_size)
    drawn = np.random.default_rng(CANARY_SEED).choice(ordinary, CANARY_TOKENS)
    return tuple(int(token) for token in drawn)


def special_token_ids(folder: Path) -> set[int]:
    """Ids that the tokenizer or the configuration in a model folder treats apart: an engine may, too."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        for key, value in _read_json(folder / name).items():
            if key.endswith("_token_id"):
                values = value if isinstance(value, list) else [value]
                found |= {token for token in values if isinstance(token, int)}
    added = _read_json(folder / "tokenizer.json").get("added_tokens") or []
    return found | {entry["id"] for entry in added}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
