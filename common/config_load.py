"""From a TOML file and `table.key=value` words to a `RunConfig`, with errors a person can act on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from common.config import RunConfig, Table
from common.errors import ConfigError

Settings = dict[str, Any]  # nested like the TOML file


def load_config(
    path: Path | None, overrides: Sequence[str] = (), *, recipes: Mapping[str, Mapping[str, Any]]
) -> RunConfig:
    """The run's settings: defaults, then the recipe's row, then the file, then the overrides.

    Args:
        path: TOML file, or none for the defaults.
        overrides: `dotted.key=value`; the value is TOML, or a bare word taken as text.
        recipes: dotted settings of each recipe, by its name.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value is out of range, or settings contradict.
    """
    chosen = read_toml(path) if path else {}
    for word in overrides:
        key, value = parse_override(word)
        put(chosen, key, value)
    recipe = chosen.get("recipe", RunConfig.model_fields["recipe"].default)
    if recipe not in recipes:
        raise ConfigError(f"recipe = {recipe!r} is unknown{nearest(str(recipe), recipes)}; `slipstream recipes` lists all")
    settings: Settings = {}
    for key, value in [*recipes[recipe].items(), *flatten(chosen)]:
        put(settings, key, value)
    return validate(settings)


def validate(settings: Settings) -> RunConfig:
    """A `RunConfig` from nested settings; a `ConfigError` names the dotted key, the value and what is valid."""
    for key, _ in flatten(settings):
        refuse_unknown(key)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key} = {first['input']!r}: {message}" if key else message) from None


def read_toml(path: Path) -> Settings:
    try:
        # utf-8-sig: editors on Windows write a byte order mark, which TOML forbids
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None


def dump_config(config: RunConfig) -> str:
    """The whole configuration as TOML, fit to be given to `--config` again. TOML has no null: unset keys are left out."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def parse_override(word: str) -> tuple[str, Any]:
    """Split `dotted.key=value`; the value is read as TOML, and as plain text where it is not TOML."""
    key, equals, value = word.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{word!r} is not of the form key=value")
    if value.strip() in ("none", "null"):
        return key, None
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def put(settings: Settings, dotted: str, value: Any) -> None:
    *tables, last = dotted.split(".")
    for name in tables:
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise ConfigError(f"{dotted}: {name} is a single value, not a table")
    if isinstance(value, dict) and isinstance(settings.get(last), dict):
        settings[last].update(value)
    else:
        settings[last] = value


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; free-form tables such as `data.options` stay whole."""
    for name, value in settings.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and is_table(dotted):
            yield from flatten(value, dotted + ".")
        else:
            yield dotted, value


def is_table(dotted: str) -> bool:
    model: type[Table] = RunConfig
    for name in dotted.split("."):
        annotation = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, Table)):
            return False
        model = annotation
    return True


def valid_keys(model: type[Table] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key that can be set."""
    for name in model.model_fields:
        annotation = model.model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, Table):
            yield from valid_keys(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def refuse_unknown(dotted: str) -> None:
    keys = list(valid_keys())
    if not any(dotted == key or dotted.startswith(key + ".") for key in keys):
        raise ConfigError(f"{dotted} is not a setting{nearest(dotted, keys)}")


def nearest(word: str, valid: Mapping[str, Any] | Sequence[str]) -> str:
    """`: did you mean X?`, or nothing when nothing is near."""
    names = list(valid)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if not matches:  # a right key in the wrong table
        matches = [name for name in names if name.rpartition(".")[2] == word.rpartition(".")[2]]
    return f": did you mean {matches[0]}?" if matches else ""
