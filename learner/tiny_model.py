"""`builtin:tiny-sort`: the quick start's model, made on this machine in one or two minutes and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from learner.model_cache import cached_folder

FORMAT = 1  # raise when the same settings come to mean other weights or another tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySettings:
    """Everything that decides the weights, besides the seed."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    mlp_size: int = 256
    max_position_embeddings: int = 512
    steps: int = 400
    batch_size: int = 128
    learning_rate: float = 3e-3
    lr_warmup_steps: int = 20
    share_sorted: float = 0.4  # demonstrations that sort ascending, as the task wants
    share_copied: float = 0.3  # that repeat the digits; the rest sorts descending


def prepare_tiny_model(
    seed: int, cache_dir: Path, report: Callable[[str], None], settings: TinySettings | None = None
) -> Path:
    """A folder with a Qwen2 model of 0.3 M parameters (float32) and a character tokenizer, warmed up on `sort-digits`.

    Greedy answers to held-out prompts are right about half of the time, sampled ones (temperature 1) about 40 %. Made
    once for each seed and settings; later calls return at once and import nothing heavy.

    Args:
        report: is handed lines of progress.

    Raises:
        ResourceError: the cache cannot be written.
    """
    settings = settings or TinySettings()

    def build(folder: Path) -> None:
        report("making the tiny model, once: loading torch")
        from learner.quiet import no_progress_bars
        from learner.warmup import character_tokenizer, warm_up  # imports torch and transformers, seconds

        tokenizer = character_tokenizer()
        model = warm_up(settings, tokenizer, seed, report)
        with no_progress_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached_folder(cache_dir, f"tiny-sort-{_key(settings, seed)}", build)


def _key(settings: TinySettings, seed: int) -> str:
    text = json.dumps({"format": FORMAT, "seed": seed, **asdict(settings)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
