"""Whole runs as a user starts them: the `slipstream` command in a process of its own, on real Ray and real vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from buffer.archive import part_files

ROOT = Path(__file__).parent.parent
END_LIMIT_S = 240.0  # of a whole run, so that a hang fails the test

SMALL = (  # overrides that make a run small
    "data.source=task:sort-digits",
    "data.chat=never",
    "rollout.max_prompt_tokens=8",
    "rollout.max_new_tokens=6",
    "rollout.max_tokens=16",
    "rollout.slots=16",
    "rollout.num_actors=1",
    "buffer.batch_size=16",
    "learner.learning_rate=3e-4",
    "engine.kv_cache_mib=32",
    "evaluation.num_prompts=16",
    "evaluation.every_updates=0",
    "supervision.stall_limit_s=120",
)


class Run:
    """A started command.

    Args:
        words: of the command line, after `slipstream`.
    """

    def __init__(self, *words: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "deploy.cli", *words]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command,
            cwd=cwd or ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a signal to the test must not reach it, nor the other way round
        )
        self.children: list[psutil.Process] = []

    def finish(self, limit_s: float = END_LIMIT_S) -> tuple[int, str]:
        """Exit status and everything it printed."""
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.note_children()
            self.process.kill()
            for child in self.children:
                child.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"the run did not end within {limit_s:.0f} s:\n{output}") from None
        return self.process.returncode, output

    def note_children(self) -> list[psutil.Process]:
        """Remember every process that the run has started so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children = psutil.Process(self.process.pid).children(recursive=True)
        return self.children

    def survivors(self, limit_s: float = 20.0) -> list[str]:
        """Remembered processes that are still there after `limit_s`."""
        _, alive = psutil.wait_procs(self.children, timeout=limit_s)
        return [f"{child.pid} {' '.join(child.cmdline())}" for child in alive if child.is_running()]

    def wait_for(self, happened: Callable[[], bool], limit_s: float = END_LIMIT_S) -> None:
        """Until something has happened, as long as the run goes on."""
        deadline = time.monotonic() + limit_s
        while not happened():
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early:\n{self.process.stdout and self.process.stdout.read()}")
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"it did not happen within {limit_s:.0f} s")
            time.sleep(0.05)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of one kind."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [record for line in lines if line.endswith("}") and (record := json.loads(line))["kind"] == kind]


def trained_rows(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Archived trajectories that were trained on."""
    for path in part_files(run_dir / "trajectories"):
        yield from (row for row in pq.read_table(path).to_pylist() if row["outcome"] == "trained")
