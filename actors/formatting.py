"""Prompts and observations as token ids. Ids go in and ids come out: what is in the stream is never encoded again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import DataConfig
from common.errors import ConfigError, ModelError
from common.types import Prompt

Messages = Sequence[Mapping[str, str]]

_SENTINEL = "slipstream-sentinel-5b1f"  # stands for the model's turn in a rendered chat; no template changes it


class PromptFormatter:
    """Ids for the engine from prompts and observations, text for rewards and environments from ids.

    Args:
        tokenizer: of transformers. A pad token is not needed.
        data: decides about the chat template.
        stop_token_ids: EOS ids of the model, from its generation config.

    Raises:
        ConfigError: chat is asked for and the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, data: DataConfig, stop_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = data.system_prompt
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        require_template(data, self._has_template)
        self._wrap_text = data.chat == "always" or (data.chat == "auto" and self._has_template)
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
        stops = {*stop_token_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
        if self._has_template:
            stops |= self._end_of_turn()
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        """Ids that end a turn: every EOS of the model, and the token that ends a turn in the chat template."""

    def is_chat(self, prompt: Prompt) -> bool:
        return bool(prompt.messages) or self._wrap_text

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """[n] ids, n >= 1; one BOS if the model has one, whether the template or the tokenizer writes it.

        Raises:
            ConfigError: the prompt is a chat and the model has no chat template.
            ValueError: the template refuses the messages, or nothing is left of the prompt.
        """
        if not self.is_chat(prompt):
            ids = self._encode(prompt.text)
            ids = ids if ids[: len(self._bos)] == self._bos else self._bos + ids
        else:
            # The template is the authority on BOS in a chat: nothing is put in front of what it writes.
            ids = self._encode(self._render(self._messages(prompt), prompt.prompt_id))
        if not ids:
            raise ValueError(f"prompt {prompt.prompt_id} has no tokens")
        return ids

    def observation_ids(self, prompt: Prompt, observation: str | Messages, last_id: int) -> list[int]:
        """Ids between the model's turn and its next one.

        Plain prompts: the observation's own ids. Chats: what the template puts between two assistant turns, the
        observation as a user message in it; a text is one user message.

        Args:
            prompt: what the episode began with.
            last_id: last id of the stream; where the model has sampled the token that ends its turn, the template's
                is left out.

        Raises:
            ValueError: a list of messages for a plain prompt, or the template refuses them.
        """
        if not self.is_chat(prompt):
            if not isinstance(observation, str):
                raise ValueError(f"prompt {prompt.prompt_id} is plain text, so an observation must be a text too")
            return self._encode(observation)
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
        ids = self._encode(self._after_turn(messages, prompt.prompt_id))
        return ids[1:] if ids[:1] == [last_id] else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)  # type: ignore[no-any-return]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _messages(self, prompt: Prompt) -> list[Mapping[str, str]]:
        if prompt.messages:
            if not self._has_template:
                raise ConfigError(
                    f"prompt {prompt.prompt_id} is a list of messages, and the model has no chat template: "
                    "give prompts as text, or put a chat_template.jinja into the model's folder"
                )
            return list(prompt.messages)
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, {"role": "user", "content": prompt.text}]

    def _render(self, messages: Messages, prompt_id: str, *, generate: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:  # templates raise what they like: jinja's errors, TypeError, …
            raise ValueError(f"the chat template refuses prompt {prompt_id}: {error}") from error
        return str(text)

    def _after_turn(self, messages: Messages, prompt_id: str, *, generate: bool = True) -> str:
        """What the template writes after the content of an assistant turn that `messages` follow."""
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        _, found, after = self._render([*turn, *messages], prompt_id, generate=generate).partition(_SENTINEL)
        if not found:
            raise ValueError(
                f"the chat template does not show the assistant's turn, so prompt {prompt_id} cannot go on"
            )
        return after

    def _end_of_turn(self) -> set[int]:
        """The special token that the template puts right after the assistant's content, if it does."""
        try:
            ids = self._encode(self._after_turn([], "of the check", generate=False))
        except ValueError:  # a template that wants other roles shows that with the prompts
            return set()
        return set(ids[:1]) & set(self._tokenizer.all_special_ids)


def require_template(data: DataConfig, has_template: bool) -> None:
    """
    Raises:
        ConfigError: chat is asked for and the model has no chat template.
    """
    if data.chat == "always" and not has_template:
        raise ConfigError(
            'data.chat = "always" needs a chat template, and the model has none: set data.chat = "never", '
            "or put a chat_template.jinja into the model's folder"
        )


def load_formatter(model_folder: Path, data: DataConfig) -> PromptFormatter:
    """The formatter of a model folder.

    Raises:
        ModelError: the folder has no tokenizer that transformers can load.
        ConfigError: see `PromptFormatter`.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    except Exception as error:  # OSError, ValueError, KeyError and more, all of which mean the same here
        raise ModelError(f"model.path: no tokenizer can be loaded from {model_folder}: {error}") from error
    return PromptFormatter(tokenizer, data, read_eos_ids(model_folder))


def read_eos_ids(model_folder: Path) -> tuple[int, ...]:
    """EOS ids of `generation_config.json`, of which there may be several or none."""
    path = model_folder / "generation_config.json"
    if not path.exists():
        return ()
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    return tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()
