"""From the columns of a row to a `Prompt`, and which prompts are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.types import Prompt


class BadRowError(ValueError):
    """The row cannot be a prompt; the message says why."""


def to_prompt(values: Mapping[str, Any], prompt_id: str, *, prompt_column: str, answer_column: str) -> Prompt:
    """The prompt in a row; its other columns stay with it. Text is taken as it is, white space and all.

    A number as the answer becomes its text, other values their JSON.

    Raises:
        BadRowError: the prompt is missing, empty or neither text nor chat messages, or text in the row is not Unicode.
    """
    if prompt_column not in values:
        columns = ", ".join(map(str, values)) or "no columns"
        raise BadRowError(f"there is no column {prompt_column!r} (but {columns}): data.prompt_column names it")
    _refuse_surrogates(values)
    prompt, answer = values[prompt_column], values.get(answer_column)
    if answer is not None and not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise BadRowError(f"the prompt in column {prompt_column!r} is empty")
        content: dict[str, Any] = {"text": prompt}
    else:
        content = {"messages": _messages(prompt, prompt_column)}
    row = {name: value for name, value in values.items() if name not in (prompt_column, answer_column)}
    return Prompt(prompt_id=prompt_id, epoch=0, answer=answer, row=row, **content)


def hold_out(prompts: Sequence[Prompt], num_prompts: int, *, at_most: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split off prompts that are not trained on. Returns those to train on, and those held out.

    The hash of a prompt's content alone decides: two rows with the same prompt are never on both sides, and neither the
    order of the rows nor the seed of the run matters. The held-out part has each content once.

    Args:
        num_prompts: to hold out.
        at_most: share of the different contents that may be held out.
    """
    by_content: dict[str, Prompt] = {}
    for prompt in prompts:
        by_content.setdefault(content_hash(prompt), prompt)
    chosen = sorted(by_content)[: min(num_prompts, int(at_most * len(by_content)))]
    held_out = set(chosen)
    return [p for p in prompts if content_hash(p) not in held_out], [by_content[content] for content in chosen]


def content_hash(prompt: Prompt) -> str:
    """Of the text or the messages; the same on every machine."""
    content = [dict(message) for message in prompt.messages] if prompt.messages else prompt.text
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _messages(prompt: Any, prompt_column: str) -> tuple[dict[str, str], ...]:
    if not isinstance(prompt, list) or not prompt:
        shown = "an empty list" if prompt == [] else "null" if prompt is None else type(prompt).__name__
        raise BadRowError(
            f"the prompt in column {prompt_column!r} is {shown}, neither text nor a list of chat messages"
        )
    messages = []
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise BadRowError(f"message {index} of column {prompt_column!r} is not an object with role and content")
        fields = {name: value for name, value in message.items() if value is not None}  # tables fill up with nulls
        if not {"role", "content"} <= fields.keys() or not all(isinstance(value, str) for value in fields.values()):
            raise BadRowError(f"message {index} of column {prompt_column!r} must have role and content, both text")
        messages.append(fields)
    return tuple(messages)


def _refuse_surrogates(values: Mapping[str, Any]) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRowError("there is half a surrogate pair in its text, which no tokenizer can take") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRowError(f"its values are not plain data: {error}") from None
