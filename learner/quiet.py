"""Without the progress bars of libraries: what a run says of its progress are lines of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def no_progress_bars(*modules: ModuleType) -> Iterator[None]:
    """Neither transformers nor the hub's package draws a bar in the block; afterwards they do as they did before.

    Args:
        modules: that draw theirs with a `tqdm` of their own, which no setting reaches.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with contextlib.ExitStack() as stack:
        if shown:
            stack.callback(logging.enable_progress_bar)
        for module in modules:
            stack.callback(setattr, module, "tqdm", module.tqdm)
            module.tqdm = _no_bar  # type: ignore[attr-defined]
        yield


def _no_bar(items: Any, **_: Any) -> Any:
    return items
