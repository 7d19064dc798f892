"""Every setting in words, from the config classes themselves."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from common.config import RunConfig
from common.config_load import nearest
from common.errors import ConfigError
from common.table import Table

BOUNDS = {annotated_types.Ge: "≥ {.ge:g}", annotated_types.Gt: "> {.gt:g}"}
BOUNDS |= {annotated_types.Le: "≤ {.le:g}", annotated_types.Lt: "< {.lt:g}"}
NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "table"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key of the config."""

    key: str  # dotted
    kind: str  # what may be given
    default: str  # as it is written in TOML
    description: str


def all_settings(model: type[Table] = RunConfig, prefix: str = "") -> Iterator[Setting]:
    """Settings in the order of the classes, those at the top first."""
    tables = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            tables.append((name, field.annotation))
            continue
        yield Setting(
            key=prefix + name,
            kind=kind_of(field),
            default=toml_of(default_of(field)),
            description=field.description or "",
        )
    for name, table in tables:
        yield from all_settings(table, f"{prefix}{name}.")


def describe_settings(words: Sequence[str] = ()) -> str:
    """Settings whose key begins with one of the words, or all: key, kind, default, meaning.

    Raises:
        ConfigError: no key begins with a word.
    """
    settings = list(all_settings())
    for word in words:
        if not any(_under(setting.key, word) for setting in settings):
            names = [setting.key for setting in settings] + [name for name, _ in _tables()]
            hint = nearest(word, names) or "; `slipstream config` lists all"
            raise ConfigError(f"{word} is neither a setting nor a table{hint}")
    blocks = []
    for table, purpose in [("", "at the top of the file, before any table"), *_tables()]:
        chosen = [
            s
            for s in settings
            if s.key.rpartition(".")[0] == table and (not words or any(_under(s.key, w) for w in words))
        ]
        if chosen:
            heading = f"[{table}]  {purpose}" if table else purpose
            blocks.append("\n".join([heading, *(_entry(setting) for setting in chosen)]))
    return "\n\n".join(blocks)


def kind_of(field: FieldInfo) -> str:
    """`whole number ≥ 1`, `"a" | "b"`, `number > 0, or none`."""
    bounds = ", ".join(BOUNDS[type(item)].format(item) for item in field.metadata if type(item) in BOUNDS)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    if type(None) in get_args(field.annotation):
        return f"{' or '.join(map(_kind, kinds))} {bounds}".rstrip() + ", or none"
    return f"{_kind(field.annotation)} {bounds}".rstrip()


def default_of(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined, "every setting has a default"
    return value


def toml_of(value: Any) -> str:
    """A value as it is written in the file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_of, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in arguments)
    if origin is Annotated:
        bounds = [BOUNDS[type(item)].format(item) for meta in arguments[1:] for item in meta.metadata]
        return f"{_kind(arguments[0])} {', '.join(bounds)}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_kind, arguments))}]"
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    return NAMES[origin or annotation]


def _tables() -> list[tuple[str, str]]:
    """Name and purpose of each table."""
    found = []
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table):
            purpose = (field.annotation.__doc__ or "").partition(": ")[2] or (field.annotation.__doc__ or "")
            found.append((name, purpose.strip().splitlines()[0]))
    return found


def _under(key: str, word: str) -> bool:
    return key == word or key.startswith(word + ".")


def _entry(setting: Setting) -> str:
    return f"  {setting.key} = {setting.default}    {setting.kind}\n      {setting.description}"
