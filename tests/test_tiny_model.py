"""The quick start's model: made the same way every time, with a tokenizer that loses nothing, and room to learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer.tasks import sort_digits
from learner import warmup
from learner.tiny_model import TinySettings, prepare_tiny_model

QUICK = TinySettings(hidden_size=16, num_heads=2, num_kv_heads=1, mlp_size=16, steps=3, batch_size=4)


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny_model(0, tmp_path_factory.mktemp("cache"), silent, QUICK)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_seed_decides_the_weights(quick_model: Path, tmp_path: Path) -> None:
    assert weights(prepare_tiny_model(0, tmp_path, silent, QUICK)) == weights(quick_model)
    assert weights(prepare_tiny_model(1, tmp_path, silent, QUICK)) != weights(quick_model)


def test_other_settings_make_another_folder(quick_model: Path) -> None:
    other = TinySettings(hidden_size=16, num_heads=2, num_kv_heads=1, mlp_size=16, steps=2, batch_size=4)
    assert prepare_tiny_model(0, quick_model.parent, silent, other) != quick_model


def test_second_call_makes_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare_tiny_model(0, tmp_path, lines.append, QUICK)
    assert lines[0] == "making the tiny model, once: loading torch"
    assert lines[-1].startswith("making the tiny model: step 3 of 3, loss ")
    lines.clear()
    prepare_tiny_model(0, tmp_path, lines.append, QUICK)
    assert lines == []


def test_making_it_draws_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare_tiny_model(6, tmp_path, silent, QUICK)
    assert capfd.readouterr() == ("", "")


def test_each_step_is_reported_when_steps_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "REPORT_EVERY_S", 0.0)
    lines: list[str] = []
    prepare_tiny_model(7, tmp_path, lines.append, QUICK)
    assert [line.partition(",")[0][-11:] for line in lines[1:]] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]


def test_making_it_leaves_torch_as_it_was(tmp_path: Path) -> None:
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        prepare_tiny_model(5, tmp_path, silent, QUICK)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), generator)


def test_saved_model_is_float32_with_one_tied_embedding(quick_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quick_model)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(quick_model).eos_token_id


def test_tokenizer_has_one_token_for_each_character(quick_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_model)
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    ids = [tokenizer.encode(character) for character in characters]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(characters)
    assert len(tokenizer.encode("s:5271=")) == 7  # no BOS, no EOS
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(quick_model).config.vocab_size


@pytest.mark.parametrize("text", ["s:5271=1257", " two  spaces , and\nlines\t!", "café 世界", "don't <b>"])
def test_text_survives_the_tokenizer(quick_model: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_model)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_eos_is_left_out_of_decoded_text(quick_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_model)
    ids = [*tokenizer.encode("1257"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1257"


@torch.no_grad()
def greedy_answers(folder: Path, prompts: list[str]) -> list[str]:
    """Five greedy tokens after each prompt, EOS written out."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(tokenizer(prompts)["input_ids"])
    for _ in range(5):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return [tokenizer.decode(row[-5:]) for row in ids.tolist()]


@pytest.mark.slow
def test_warmed_up_model_has_the_skill_and_uses_it_half_of_the_time(tmp_path: Path) -> None:
    folder = prepare_tiny_model(0, tmp_path, silent)
    rows = sort_digits("held_out")
    answers = greedy_answers(folder, [row["prompt"] for row in rows])
    right = sum(answer == row["answer"] + "<eos>" for answer, row in zip(answers, rows, strict=True)) / len(rows)
    assert 0.4 <= right <= 0.6
    shown = [
        {row["answer"], row["answer"][::-1], row["prompt"][2:6]} for row in rows
    ]  # sorted up, sorted down, copied: all that was ever demonstrated
    made_up = sum(answer.removesuffix("<eos>") not in some for answer, some in zip(answers, shown, strict=True))
    assert made_up / len(rows) <= 0.06
