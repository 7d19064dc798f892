"""Import of a user's code by its dotted path."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from common.errors import ConfigError


def load_object(path: str, import_dir: str = "", *, setting: str = "") -> Any:
    """The object that `MODULE:NAME` means.

    Args:
        path: dotted module, a colon, and a name in it.
        import_dir: folder to search after everything that is installed; empty: the current directory. It goes to the
            end of the path, so that a file of the user's cannot take the place of a package of ours.
        setting: dotted key that `path` comes from, for messages.

    Raises:
        ConfigError: `path` is malformed, the module or the name is missing, or the module raises while it is imported.
    """
    wanted = f"{setting} = {path!r}" if setting else repr(path)
    module_name, colon, name = path.partition(":")
    if not colon or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{wanted} is not of the form MODULE:NAME")
    folder = os.path.abspath(import_dir or os.curdir)
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{wanted}: there is no module {error.name!r} in {folder} or among the installed packages; "
                "import_dir names the folder to search"
            ) from None
        raise ConfigError(f"{wanted}: importing {module_name} raised {describe(error)}") from error
    except Exception as error:
        raise ConfigError(f"{wanted}: importing {module_name} raised {describe(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{wanted}: {where} has no {name!r}") from None


def describe(error: BaseException) -> str:
    """Kind and message of an error, and the place in the file where it was raised."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # names file and line itself
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text
