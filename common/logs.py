"""Log files of a service: everything it or a library prints goes to `<run_dir>/logs/<name>.log`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def log_to_file(run_dir: Path, name: str) -> None:
    """Send logging, standard output and standard error of this process to a file of its own."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / f"{name}.log").open("a", buffering=1, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stream.fileno(), 1)  # also catches what native code prints
    os.dup2(stream.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
