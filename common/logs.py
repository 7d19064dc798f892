"""Log files of a service: everything it or a library prints goes to `<run_dir>/logs/<name>.log`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_file(run_dir: Path, name: str) -> None:
    """Send logging, standard output and standard error of this process to a file of its own."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / f"{name}.log").open("a", buffering=1, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stream.fileno(), 1)  # also catches what native code prints
    os.dup2(stream.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format=FORMAT, force=True)


@contextmanager
def driver_log(run_dir: Path) -> Iterator[None]:
    """Send logging of this process to `logs/driver.log`; what it prints stays on the terminal."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
