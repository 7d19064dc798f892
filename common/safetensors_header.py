"""What the header of a safetensors file says of its tensors, without reading them."""

from __future__ import annotations

import json
from pathlib import Path

OBSOLETE_SUFFIX = "rotary_emb.inv_freq"  # a buffer that old checkpoints carry and no model loads


def shapes_in_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name, without tensors that no model loads.

    Format: little-endian u64 length, then JSON of that length.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read, or is not of this format.
    """
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {
        name: tuple(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and not name.endswith(OBSOLETE_SUFFIX)
    }
