"""Folder of a run: the one place where everything it writes can be found again.

config.toml          every setting, as the run uses it
metrics.jsonl        one JSON object a line: "kind" is update, evaluation or event
trajectories/        what was generated, as Parquet parts
finished/            what the learner would need again after going back to a checkpoint; only while the run goes on
checkpoints/         what the run can be resumed from
tokenizer/           the model's tokenizer, for reading trajectories without the model
report.html          curves and tables; report.png is its picture
logs/                what each service said
lock                 held by the process that runs in this folder
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.config import RunConfig
from common.config_load import dump_config, read_toml, validate
from common.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

Record = dict[str, Any]


class RunDir:
    """Paths and records of one run. Making the object touches no file.

    Args:
        path: folder that `new_run_dir` made, or an old one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # services are started in other working directories
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.trajectories = self.path / "trajectories"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = self.path / "tokenizer"
        self.logs = self.path / "logs"
        self._complained = False

    def config(self) -> RunConfig:
        """The settings that the run was started with; `run_dir` is where the folder is now.

        Raises:
            ConfigError: this is no run directory, or its config was damaged.
        """
        if not self.config_file.exists():
            what = "has no config.toml: it is not a run directory" if self.path.is_dir() else "does not exist"
            raise ConfigError(f"{self.path} {what}; `slipstream train` makes one")
        return validate(read_toml(self.config_file)).model_copy(update={"run_dir": str(self.path)})

    def write_config(self, config: RunConfig) -> None:
        """Replace config.toml, whole or not at all."""
        aside = self.config_file.with_suffix(".toml.tmp")
        try:
            aside.write_text(dump_config(config), encoding="utf-8")
            aside.replace(self.config_file)
        except OSError as error:
            raise ResourceError(f"{self.config_file} cannot be written: {error.strerror}") from None

    @property
    def holds_run(self) -> bool:
        """Whether there is training to go on with, or to lose."""
        has_checkpoint = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return has_checkpoint or any(record.get("kind") == "update" for record in self.records())

    def record(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl. Numbers that are not finite become null.

        A line is one write; what a crash or a full disk leaves of a line is closed off before the next. A line that
        cannot be written is lost, with one warning: the run goes on.
        """
        line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            with self.metrics_file.open("ab+", buffering=0) as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        line = b"\n" + line
                if file.write(line) != len(line):
                    raise OSError("disk full")
        except OSError as error:
            if not self._complained:
                log.warning("metrics are lost, the run goes on: %s: %s (this is said once)", self.metrics_file, error)
            self._complained = True

    def records(self) -> Iterator[Record]:
        """Lines of metrics.jsonl in order; half-written ones are left out."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(record, dict):
                    yield record

    def saved_updates(self) -> int:
        """Completed updates of the newest checkpoint whose saving was finished; 0 without one."""
        saved = [path.parent.name for path in self.checkpoints.glob("update-*/complete.json")]
        return max((int(name.removeprefix("update-")) for name in saved), default=0)

    def highest_version(self) -> int:
        """Highest weight version that was recorded; 0 when none was."""
        return max((int(record.get("version") or 0) for record in self.records()), default=0)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from running in this folder until the end of the block, or of this process.

        Raises:
            ResourceError: another process has it; the message names it.
        """
        file = (self.path / "lock").open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ResourceError(
                    f"run directory {self.path} is in use by {file.read().strip() or 'another process'}: "
                    "wait for it to end, or choose another run_dir"
                ) from None
            except OSError as error:  # some network file systems have no locks
                log.warning("%s cannot be locked (%s): take care not to run twice in it", self.path, error.strerror)
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
            file.flush()
            yield


def new_run_dir(config: RunConfig, *, clock: Callable[[], float] = time.time) -> tuple[RunDir, RunConfig]:
    """Make the folder of a new run and write its config.

    Returns:
        The folder, and the config with every path absolute, so that the run can be resumed from anywhere.

    Raises:
        ConfigError: the folder already holds a run, or something else.
        ResourceError: it cannot be made.
    """
    try:
        path = _named(Path(config.run_dir).expanduser()) if config.run_dir else _unnamed(config.recipe, clock())
    except OSError as error:
        raise ResourceError(f"run_dir {error.filename} cannot be made: {error.strerror}") from None
    run_dir = RunDir(path)
    config = with_absolute_paths(config, run_dir.path)
    run_dir.write_config(config)
    return run_dir, config


def with_absolute_paths(config: RunConfig, run_dir: Path) -> RunConfig:
    """`config` that means the same when read in another working directory. What does not exist stays as it is."""
    changes: dict[str, dict[str, str]] = {
        "model": {"path": _absolute(config.model.path)},
        "data": {"source": _absolute(config.data.source)},
        "evaluation": {"source": _absolute(config.evaluation.source)},
        "weights": {"folder": _absolute(config.weights.folder)},
    }
    tables = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    import_dir = str(Path(config.import_dir).expanduser().absolute())
    return config.model_copy(update={**tables, "import_dir": import_dir, "run_dir": str(run_dir)})


def _absolute(text: str) -> str:
    """Of an existing file or folder; anything else, such as `task:NAME`, is left alone."""
    path = Path(text).expanduser()
    return str(path.absolute()) if text and path.exists() else text


def _named(path: Path) -> Path:
    run_dir = RunDir(path)
    if path.is_dir():
        if run_dir.holds_run:
            raise ConfigError(
                f"run_dir {path} already holds a run: go on with it by `slipstream resume {path}`, "
                "or choose another run_dir"
            )
        if run_dir.config_file.exists():
            with run_dir.lock():  # it may be starting at this moment
                return path
        if any(path.iterdir()):
            raise ConfigError(f"run_dir {path} is not empty and not a run of ours: choose another run_dir")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _unnamed(recipe: str, now: float) -> Path:
    base = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{recipe}"
    for number in range(1, 1000):
        path = Path("runs") / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ResourceError(f"runs/{base} and 999 names like it are taken: set run_dir")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
