"""The header of a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from common.safetensors_header import shapes_in_header


def test_names_and_shapes_are_read_without_what_no_model_loads(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(2, 3),
        "scale": torch.zeros(()),
        "layers.0.rotary_emb.inv_freq": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    assert shapes_in_header(tmp_path / "m.safetensors") == {"a.weight": (2, 3), "scale": ()}
