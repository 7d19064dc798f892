"""From `model.path` to a local folder in the transformers format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from learner.smollm2 import prepare_smollm2
from learner.tiny_model import prepare_tiny_model

TINY_SORT = "builtin:tiny-sort"
SMOLLM2 = "package:smollm2"

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


def resolve_model(path: str, *, seed: int, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """The folder that learner and engines load the starting model from. Nothing is ever downloaded.

    Args:
        path: `builtin:tiny-sort`, `package:smollm2`, or a local folder.
        seed: of the built-in model's weights.
        cache_dir: where models that are made here are kept; see `learner.model_cache.default_cache_dir`.
        report: is handed lines of progress.

    Raises:
        ModelError: no such model, or the folder lacks its configuration, weights or tokenizer.
        ResourceError: the cache cannot be written.
    """
    if path == TINY_SORT:
        return prepare_tiny_model(seed, cache_dir, report)
    if path == SMOLLM2:
        return prepare_smollm2(cache_dir, report)
    if path.startswith(("builtin:", "package:")):
        raise ModelError(f"model.path = {path!r} is unknown: the models that can be made are {TINY_SORT} and {SMOLLM2}")
    return _checked_folder(path)


def has_chat_template(path: str) -> bool:
    """Whether the model at `model.path` has one, by its files; true if that cannot be told: no such folder."""
    if path in (TINY_SORT, SMOLLM2):
        return path == SMOLLM2
    folder = Path(path).expanduser()
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if not folder.is_dir() or any((folder / name).exists() for name in names):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # loading the tokenizer will say more
        return True


def _checked_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ModelError(
                f"model.path = {path!r} is a file: give the folder with config.json, weights and tokenizer"
            )
        if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith("."):
            raise ModelError(
                f"model.path = {path!r}: there is no such folder, and a run downloads no model; if this is a name on "
                f"the Hugging Face hub, run `hf download {path} --local-dir DIR` and set model.path to DIR"
            )
        raise ModelError(f"model.path = {path!r}: no such folder; give a local folder, {TINY_SORT} or {SMOLLM2}")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model folder {folder} has no config.json: it is not in the transformers format") from None
    except ValueError as error:
        raise ModelError(
            f"{folder / 'config.json'} is not valid JSON ({error}): copy or download the model again"
        ) from None
    _require(folder, _WEIGHTS, "weights", "copy or download the model again, all files of it")
    _require(folder, _TOKENIZERS, "tokenizer", "save the tokenizer there with tokenizer.save_pretrained")
    return folder.resolve()


def _require(folder: Path, patterns: tuple[str, ...], what: str, remedy: str) -> None:
    if not any(next(folder.glob(pattern), None) for pattern in patterns):
        raise ModelError(f"model folder {folder} has no {what} (looked for {', '.join(patterns)}): {remedy}")
