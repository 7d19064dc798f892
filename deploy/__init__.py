"""Command line, wiring, supervision and reports, and what a cluster needs.

Our packages have plain names (`common`, `buffer`, ...), which other code may use too. Importing a stranger instead of
ours fails late and far from the cause, in a Ray worker above all, so importing `deploy` checks for it first.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("common", "buffer", "actors", "learner")


def find_shadowing_package() -> str | None:
    """Say which top-level package of another project would be imported in place of ours, and what to do.

    Imports nothing. Looks along `sys.path`, and in the current directory even where `sys.path` does not name it: Ray
    puts the driver's current directory in front of the path of every worker.

    Returns:
        One line that names the package, the offending path and the remedy; None when all is well.
    """
    for name in _PACKAGES:
        ours = _ROOT / name
        for spec in (find_spec(name), _regular_package_in_current_directory(name)):
            theirs = None if spec is None else _location(spec)
            if theirs is not None and theirs != ours:
                return (
                    f"the package `{name}` at {theirs} shadows Slipstream's own at {ours}; "
                    "start from another directory, or rename, uninstall or take off PYTHONPATH what is there"
                )
    return None


def _regular_package_in_current_directory(name: str) -> ModuleSpec | None:
    """The module or package `name` there; None for a mere folder of that name, which loses against a real package."""
    spec = PathFinder.find_spec(name, [""])
    return spec if spec is not None and spec.origin is not None else None


def _location(spec: ModuleSpec) -> Path | None:
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


if (_complaint := find_shadowing_package()) is not None:
    # Not an exception class of ours: `common.errors` may be the very thing that is shadowed.
    print(f"slipstream: error: {_complaint}", file=sys.stderr)
    raise SystemExit(2)
