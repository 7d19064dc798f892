"""Where and how the learner computes, from the configuration and the machine."""

from __future__ import annotations

import torch
from transformers.utils import is_flash_attn_2_available

from common.config import RunConfig
from learner.batching import Layout
from learner.trunk import Compute


def choose_device(config: RunConfig) -> torch.device:
    wanted = config.learner.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def choose_layout(config: RunConfig, device: torch.device) -> Layout:
    """Packing pays where attention takes sequences of any length; through a dense mask it costs more than padding."""
    if config.learner.layout == "auto":
        return "packed" if _has_flash_attention(config, device) else "rows"
    return config.learner.layout


def choose_compute(config: RunConfig, device: torch.device, layout: Layout) -> Compute:
    """bfloat16 on GPUs if that is what engines serve; on CPUs it is slower than float32."""
    dtype = torch.bfloat16 if device.type == "cuda" and config.model.dtype == "bfloat16" else torch.float32
    if layout == "rows" or device.type == "cpu":
        return Compute(device, dtype)
    return Compute(device, dtype, "flash_attention_2" if _has_flash_attention(config, device) else "flex_attention")


def _has_flash_attention(config: RunConfig, device: torch.device) -> bool:
    """It knows no float32."""
    return device.type == "cuda" and config.model.dtype == "bfloat16" and bool(is_flash_attn_2_available())
