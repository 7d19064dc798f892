"""From a TOML file and `table.key=value` words to a `RunConfig`, with errors a person can act on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import ValidationError

from common.config import RunConfig
from common.errors import ConfigError
from common.table import Table

Settings = dict[str, Any]  # nested like the TOML file
UNSET = "none"  # how TOML, which has no null, says that a setting that may be unset is unset


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
    if not isinstance(recipe, str) or recipe not in recipes:
        raise ConfigError(
            f"recipe = {recipe!r} is unknown{nearest(str(recipe), recipes)}; `slipstream recipes` lists all"
        )
    settings: Settings = {}
    for key, value in [*recipes[recipe].items(), *flatten(chosen)]:
        put(settings, key, value)
    return validate(settings)


def validate(settings: Settings) -> RunConfig:
    """A `RunConfig` from nested settings; a `ConfigError` names the dotted key, the value and what is valid."""
    for key, value in list(flatten(settings)):
        refuse_unknown(key)
        if value == UNSET and may_be_unset(key):
            put(settings, key, None)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """The first setting that is wrong, its value, and what would be valid."""
    keys = set(valid_keys())
    found: dict[str, list[str]] = {}  # a setting that allows several kinds of value has a message for each
    for item in error.errors():
        # Pydantic appends the kind it tried to the place; what follows the key is of no use to the reader.
        places = [".".join(map(str, item["loc"][:length])) for length in range(len(item["loc"]), 0, -1)]
        key = next((place for place in places if place in keys), ".".join(map(str, item["loc"])))
        message = item["msg"].removeprefix("Value error, ")
        found.setdefault(f"{key} = {item['input']!r}: " if key else "", []).append(message)
    place, messages = next(iter(found.items()))
    return place + ", or ".join(dict.fromkeys(messages))


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
    """The whole configuration as TOML, fit to be given to `--config` again. TOML has no null: unset keys say "none"."""
    settings: Settings = {}
    for key, value in flatten(config.model_dump()):
        put(settings, key, UNSET if value is None else value)
    return tomli_w.dumps(settings)


def parse_override(word: str) -> tuple[str, Any]:
    """Split `dotted.key=value`; the value is read as TOML, and as plain text where it is not TOML or text is wanted.

    Raises:
        ConfigError: there is no `=`, or the key is unknown.
    """
    key, equals, text = word.partition("=")
    key, text = key.strip(), text.strip()
    if not equals or not key:
        raise ConfigError(f"{word!r} is not of the form key=value")
    refuse_unknown(key)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text
    # run_dir=2026-08-01 is a folder, though TOML reads a date
    return key, text if annotation_of(key) is str and not isinstance(value, str) else value


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


def annotation_of(dotted: str) -> Any:
    """Type of a setting or table; none for an unknown key, and inside free-form tables."""
    annotation: Any = RunConfig
    for name in dotted.split("."):
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Table) else {}
        annotation = fields[name].annotation if name in fields else None
    return annotation


def is_table(dotted: str) -> bool:
    annotation = annotation_of(dotted)
    return isinstance(annotation, type) and issubclass(annotation, Table)


def may_be_unset(dotted: str) -> bool:
    return type(None) in get_args(annotation_of(dotted))


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
    if is_table(dotted):
        raise ConfigError(
            f"{dotted} is a table: set one of its keys, such as {next(k for k in keys if k.startswith(dotted))}"
        )
    if not any(dotted == key or dotted.startswith(key + ".") for key in keys):
        tables = sorted({key.partition(".")[0] for key in keys if "." in key})
        raise ConfigError(
            f"{dotted} is not a setting{nearest(dotted, [*keys, *tables])}; `slipstream config` lists all"
        )


def nearest(word: str, valid: Mapping[str, Any] | Sequence[str]) -> str:
    """`: did you mean X?`, or nothing when nothing is near."""
    names = list(valid)
    last = word.rpartition(".")[2]
    # a right key in the wrong table is nearer than any other spelling
    matches = [name for name in names if name.rpartition(".")[2] == last]
    matches = matches or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f": did you mean {matches[0]}?" if matches else ""
