"""What a publication of weights says: the learner writes it, every engine validates it before it loads anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Place of one parameter, under its checkpoint name, in the bytes of a publication."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES
    offset: int  # bytes from the start of the file

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A fixed sequence and the learner's log-probs of it, to be reproduced by an engine that has loaded the weights."""

    token_ids: tuple[int, ...]  # [n]
    logprobs: tuple[
        float, ...
    ]  # [n - 1], nats at temperature 1; logprobs[i] is of token_ids[i + 1] given token_ids[: i + 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightManifest:
    """Weights of one version: raw little-endian tensors one after the other in a file, and how to check them.

    `path` is a file on node `node_id`; other nodes fetch the same bytes through Ray's object store and replace `path`.
    """

    version: int
    path: str
    size_bytes: int
    digest: str  # blake3 of the whole file, hexadecimal
    tensors: tuple[TensorSpec, ...]
    canary: Canary
    node_id: str = ""
