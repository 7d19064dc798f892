"""What a benchmark leaves behind: a table for the eye, JSON for comparisons."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """A table; the columns are the keys of the first row."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row.values())
    Console(width=120).print(table)


def save(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write `result` and where it was measured to NAME.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"benchmark": name, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": machine(), **result}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """What numbers depend on. The load is that of the last minute, other work on the machine included."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(psutil.getloadavg()[0], 1),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.stdout.strip()
