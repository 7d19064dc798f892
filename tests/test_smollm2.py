"""SmolLM2 out of its package: loads like any model, with the tokenizer and chat template it came with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ModelError
from learner.smollm2 import find_gguf, prepare_smollm2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    return prepare_smollm2(tmp_path_factory.mktemp("cache"), print)


def test_model_answers_a_question(folder: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_model_is_plain_float32_and_can_be_saved_again(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    model.save_pretrained(tmp_path)  # what a GGUF model refuses
    assert (tmp_path / "model.safetensors").stat().st_size == (folder / "model.safetensors").stat().st_size


def test_tokenizer_is_the_one_of_the_package(folder: Path) -> None:
    gguf = find_gguf()
    original = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Hello  world 12345\n\ncafé 世界 don't <|im_start|>user\n"
    assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == original.chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
