"""Prompts and observations as ids: one BOS, no id encoded twice, every stop token known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.formatting import PromptFormatter, load_formatter, read_eos_ids
from common.config import DataConfig
from common.errors import ConfigError, ModelError
from tests.fakes import BOS, CHAT_SPECIALS, CHAT_TEMPLATE, EOS, TinyTokenizer, make_prompt

HE, LLO, HELLO = 3, 4, 5
CHAT = TinyTokenizer(chat_template=CHAT_TEMPLATE, adds_bos=True, extra_special=CHAT_SPECIALS)
PLAIN = TinyTokenizer()
SYSTEM, USER, ASSISTANT, END = (CHAT.encode(piece, add_special_tokens=False)[0] for piece in CHAT_SPECIALS)


def make_formatter(tokenizer: TinyTokenizer, stop_token_ids: tuple[int, ...] = (), **data: Any) -> PromptFormatter:
    return PromptFormatter(tokenizer, DataConfig(**data), stop_token_ids)


def letters(text: str) -> list[int]:
    return PLAIN.encode(text)


def test_the_tokenizer_of_these_tests_can_tell_a_round_trip_through_text() -> None:
    assert PLAIN.encode(PLAIN.decode([HE, LLO])) == [HELLO]


def test_plain_text_is_encoded_as_it_is() -> None:
    assert make_formatter(PLAIN).prompt_ids(make_prompt("hi there")) == letters("hi there")


def test_plain_text_gets_the_bos_that_the_tokenizer_adds_once() -> None:
    """F-27."""
    formatter = make_formatter(TinyTokenizer(adds_bos=True))
    assert formatter.prompt_ids(make_prompt("hi")) == [BOS, *letters("hi")]
    assert formatter.prompt_ids(make_prompt("<s>hi")) == [BOS, *letters("hi")]


def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_give_one() -> None:
    """F-27."""
    messages = ({"role": "user", "content": "hi"},)
    ids = make_formatter(CHAT).prompt_ids(make_prompt("", messages=messages))
    assert ids == [BOS, USER, *letters("hi"), END, *letters("\n"), ASSISTANT]


def test_text_is_wrapped_as_chat_when_the_model_has_a_template_and_never_when_told_so() -> None:
    prompt = make_prompt("hi")
    wrapped = [BOS, USER, *letters("hi"), END, *letters("\n"), ASSISTANT]
    assert make_formatter(CHAT).prompt_ids(prompt) == wrapped
    assert make_formatter(CHAT, chat="always").prompt_ids(prompt) == wrapped
    assert make_formatter(CHAT, chat="never").prompt_ids(prompt) == [BOS, *letters("hi")]
    assert make_formatter(PLAIN, chat="auto").prompt_ids(prompt) == letters("hi")


def test_the_system_prompt_goes_before_text_and_not_before_messages() -> None:
    formatter = make_formatter(CHAT, system_prompt="ok")
    system = [SYSTEM, *letters("ok"), END, *letters("\n")]
    turn = [USER, *letters("hi"), END, *letters("\n"), ASSISTANT]
    assert formatter.prompt_ids(make_prompt("hi")) == [BOS, *system, *turn]
    assert formatter.prompt_ids(make_prompt("", messages=({"role": "user", "content": "hi"},))) == [BOS, *turn]


def test_chat_without_a_template_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r'set data\.chat = "never"'):
        make_formatter(PLAIN, chat="always")
    with pytest.raises(ConfigError, match=r"test/0 is a list of messages.*give prompts as text"):
        make_formatter(PLAIN).prompt_ids(make_prompt("", messages=({"role": "user", "content": "hi"},)))


def test_a_template_that_refuses_the_messages_is_named_with_the_prompt() -> None:
    picky = TinyTokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses prompt test/0"):
        make_formatter(picky).prompt_ids(make_prompt("hi"))


def test_an_observation_of_a_plain_prompt_is_its_own_ids() -> None:
    formatter = make_formatter(TinyTokenizer(adds_bos=True))
    assert formatter.observation_ids(make_prompt("hi"), "no", EOS) == letters("no")
    with pytest.raises(ValueError, match="must be a text"):
        formatter.observation_ids(make_prompt("hi"), ({"role": "user", "content": "no"},), EOS)


def test_an_observation_of_a_chat_is_what_the_template_puts_between_two_turns() -> None:
    """F-27: the token that ends the model's turn is there once, whether the model has sampled it or not."""
    formatter = make_formatter(CHAT)
    between = [*letters("\n"), USER, *letters("no"), END, *letters("\n"), ASSISTANT]
    assert formatter.observation_ids(make_prompt("hi"), "no", END) == between
    assert formatter.observation_ids(make_prompt("hi"), "no", EOS) == [END, *between]
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "no"})
    assert formatter.observation_ids(make_prompt("hi"), messages, END) == [
        *letters("\n"), SYSTEM, *letters("s"), END, *letters("\n"), USER, *letters("no"), END, *letters("\n"), ASSISTANT
    ]  # fmt: skip


def test_prompt_turn_and_observation_are_the_whole_conversation_as_the_template_has_it() -> None:
    formatter = make_formatter(CHAT)
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "no"},
    ]
    whole = CHAT.encode(CHAT.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True), False)
    sampled = [*letters("yo"), END]
    parts = [
        *formatter.prompt_ids(make_prompt("hi")),
        *sampled,
        *formatter.observation_ids(make_prompt("hi"), "no", END),
    ]
    assert parts == whole


def test_every_stop_token_is_known_and_a_pad_token_is_not_needed() -> None:
    assert make_formatter(PLAIN).stop_token_ids == (EOS,)
    assert make_formatter(PLAIN, (EOS, 9, 7)).stop_token_ids == (EOS, 7, 9)
    assert make_formatter(CHAT, (EOS,)).stop_token_ids == tuple(sorted((EOS, END)))


def test_a_template_that_ends_turns_with_ordinary_text_adds_no_stop_token() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert make_formatter(TinyTokenizer(chat_template=template)).stop_token_ids == (EOS,)


def test_text_of_sampled_ids_leaves_special_tokens_out() -> None:
    assert make_formatter(CHAT).text([HE, END, LLO, EOS]) == "hello"


def test_a_prompt_that_leaves_no_token_is_an_error() -> None:
    class Deaf(TinyTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(ValueError, match="test/0 has no tokens"):
        make_formatter(Deaf()).prompt_ids(make_prompt("hi"))


@pytest.mark.parametrize(
    ("content", "ids"), [({"eos_token_id": [2, 7]}, (2, 7)), ({"eos_token_id": 2}, (2,)), ({"eos_token_id": None}, ())]
)
def test_eos_ids_of_the_generation_config(tmp_path: Path, content: Any, ids: tuple[int, ...]) -> None:
    assert read_eos_ids(tmp_path) == ()
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_eos_ids(tmp_path) == ids


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_formatter(tmp_path, DataConfig())


def test_a_tokenizer_of_transformers_does_what_the_fake_does(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<|user|>": 2, "<|assistant|>": 3, "<|end|>": 4, "hi": 5, "no": 6, "yo": 7, "?": 8}
    words["<unk>"] = 9
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert load_formatter(tmp_path, DataConfig()).prompt_ids(make_prompt("hi no")) == [0, 5, 6]

    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    formatter = load_formatter(tmp_path, DataConfig())
    assert formatter.prompt_ids(make_prompt("hi")) == [0, 2, 5, 4, 3]
    assert formatter.observation_ids(make_prompt("hi"), "no", 4) == [2, 6, 4, 3]
    assert formatter.stop_token_ids == (1, 4)
    assert formatter.text([7, 4]) == "yo"
