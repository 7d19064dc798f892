"""From a config to a finished run: model, run directory, Ray, supervision, report."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from actors.formatting import require_template
from buffer.archive import highest_ids
from buffer.sources import load_rows
from common.config import RunConfig
from common.errors import SlipstreamError
from common.logs import driver_log
from common.publications import publication_files
from common.types import Prompt
from deploy.format import plural
from deploy.placement import resolve_auto
from deploy.progress import Progress
from deploy.report import RunSummary, summarise, write_report
from deploy.run_dir import RunDir
from deploy.services import Services, count_gpus, ray_session
from deploy.supervise import RunEnd, Supervisor
from deploy.unused import settings_without_effect
from learner.model_cache import default_cache_dir
from learner.models import has_chat_template, resolve_model
from learner.steps import read_highest_version

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class StopRequest:
    """Set by SIGINT or SIGTERM: the run saves and ends. A second signal ends it at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        before = self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> dict[signal.Signals, Any]:
        """Take both signals; returns the handlers they had. To be called again after Ray has put its own there."""
        return {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


def train(config: RunConfig, run_dir: RunDir) -> RunSummary:
    """Run a new or a resumed run to its end.

    Raises:
        SlipstreamError: the first error that no restart mends; it is the last line of logs/driver.log.
    """
    with driver_log(run_dir.path), Progress(config) as progress, StopRequest().installed() as stop:
        try:
            end = _run(config, run_dir, progress, stop)
        except SlipstreamError as error:
            run_dir.record({"kind": "event", "text": f"failed: {error}"})
            log.error("%s", error)
            raise
        except BaseException as error:
            log.exception("the run broke off: %s", error)
            raise
        progress.phase("writing the report")
        report = write_report(run_dir.path)
    stopped_by = stop.signal if end.reason == "stopped" else None  # a signal after the last update changes nothing
    return summarise(run_dir.path, end, report, stopped_by=stopped_by)


def _run(config: RunConfig, run_dir: RunDir, progress: Progress, stop: StopRequest) -> RunEnd:
    require_template(config.data, has_chat_template(config.model.path))
    progress.phase("preparing the model")
    model_folder = resolve_model(
        config.model.path, seed=config.seed, cache_dir=default_cache_dir(), report=progress.event
    )
    _keep_tokenizer(model_folder, run_dir.path)
    held_out: Sequence[Prompt] = ()
    if config.evaluation.num_prompts:
        held_out = rows = load_rows(
            config.data, seed=config.seed, split="held_out", evaluation=config.evaluation, import_dir=config.import_dir
        )
        progress.event(f"{plural(len(rows), 'prompt')} held out of the training{rows.left_out}")
    progress.phase("starting Ray")
    with ray_session(config):
        stop.install()
        resolved = resolve_auto(config, count_gpus())
        for line in settings_without_effect(resolved):
            progress.event(f"warning: {line}")
        services = Services(resolved, model_folder, run_dir.path)
        try:
            supervisor = Supervisor(resolved, services, run_dir, progress, held_out, stop)
            return supervisor.run(_buffer_state(run_dir))
        finally:
            progress.phase("ending the services")
            services.end_all()
            for file in publication_files(Path(config.weights.folder), run_dir.path):
                file.unlink(missing_ok=True)  # of a learner that was killed in the middle of a step


def _buffer_state(run_dir: RunDir) -> Mapping[str, Any] | None:
    """What a new buffer of a resumed run must know: where the prompts stand, and which labels and ids were given."""
    if not run_dir.holds_run:
        return None
    # Imported here, because it imports torch, which the driver of a new run needs not.
    from learner.checkpoint import CheckpointStore
    from learner.state import read_counters

    folder = CheckpointStore(run_dir.checkpoints, keep=run_dir.config().checkpoint.keep).newest()
    if folder is None:
        ids = highest_ids(run_dir.trajectories)
        state = {"next": [ids[name] + 1 for name in ("sample_id", "lease_id", "group_id", "batch_id")]}
    else:
        state = dict(read_counters(folder).buffer_state)
    return {**state, "highest_version": max(read_highest_version(run_dir.path), state.get("highest_version", 0))}


def _keep_tokenizer(model_folder: Path, run_dir: Path) -> None:
    """So that `rollouts` reads the run without the model."""
    target = run_dir / "tokenizer"
    target.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (model_folder / name).exists():
            shutil.copy(model_folder / name, target / name)
