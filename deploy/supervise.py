"""Runs a job on started Ray: starts the services, replaces what dies, drives the learner, evaluates, ends.

One loop over pending Ray calls; each call names the method that takes its result. Nothing waits without a limit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.rollout import EvaluationResult
from buffer.replay import BufferStatus
from common.config import RunConfig
from common.errors import RunFailedError
from common.types import BatchOutcome, Prompt
from deploy.evaluation import EvaluationSchedule
from deploy.exporter import Exporter
from deploy.failures import cause_of, died, first_line, named, replaceable
from deploy.progress import Progress
from deploy.records import evaluation_record, update_record
from deploy.run_dir import RunDir
from deploy.services import Services
from deploy.signal_watch import SignalWatch
from learner.steps import StartRecord, StepRecord

log = logging.getLogger(__name__)

POLL_S = 0.5  # longest sleep of the loop
STATUS_EVERY_S = 2.0
STEP_WAIT_S = 2.0  # how long one learner call waits for a batch, so that a stop request is seen
SAVE_LIMIT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended without an error."""

    reason: str  # "all updates done", "end of data", "stopped" or "nothing left to learn: …"
    completed_updates: int
    restarts: int


class Supervisor:
    """One run, from the first service to the last.

    Args:
        config: with every `auto` decided.
        services: starts and ends Ray actors.
        run_dir: where records go.
        progress: what a person sees.
        held_out: prompts of the evaluations; empty: none.
        stop_requested: asked often; true ends the run after the batch under way, with a checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        run_dir: RunDir,
        progress: Progress,
        held_out: Sequence[Prompt],
        stop_requested: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._services = services
        self._run_dir = run_dir
        self._progress = progress
        self._held_out = held_out
        self._stop_requested = stop_requested
        self._clock = clock
        self._exporter = Exporter(config.metrics)
        self._began = clock()
        self._pending: dict[ray.ObjectRef, Callable[[ray.ObjectRef], None]] = {}
        self._running: list[str] = []  # actors whose engine is up
        self._restarts: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._evaluations = EvaluationSchedule(config.evaluation.every_updates if held_out else None)
        self._signal = SignalWatch(config.groups.max_uninformative_batches)
        self._nothing_to_learn = ""
        self._why_no_update = ""  # the learner's reason, while the last batch brought none
        self._trained = False  # some batch taught something
        self._status: BufferStatus | None = None
        self._status_at: float | None = None  # when to ask again; none while an answer is awaited
        self._last_progress = clock()
        self._starting: dict[str, float] = {}  # services that are not ready yet, and when they must be
        self._learner_ready = False
        self._updates = 0
        self._version = 0
        self._checkpoint = ""  # newest folder
        self._ending = ""  # reason, once no further step is wanted
        self._done = False

    def run(self, buffer_state: Mapping[str, Any] | None) -> RunEnd:
        """Until the updates are done, the data ends, or a stop is requested.

        Raises:
            SlipstreamError: a service failed in a way that a restart does not mend; the first such error.
        """
        self._event(self._exporter.start())
        try:
            self._start(buffer_state)
            while not self._done:
                ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=POLL_S) if self._pending else ([], [])
                for ref in ready:
                    self._pending.pop(ref)(ref)
                self._housekeeping()
        finally:
            self._exporter.close()
        return RunEnd(reason=self._ending, completed_updates=self._updates, restarts=sum(self._restarts.values()))

    # Starting

    def _start(self, buffer_state: Mapping[str, Any] | None) -> None:
        config = self._config
        self._progress.phase("starting the buffer")
        buffer = self._services.start_buffer(buffer_state)
        num_rows = self._get(buffer.start.remote(), "buffer", config.supervision.start_time_limit_s)
        self._progress.phase(f"starting the learner and {config.rollout.num_actors} actors ({num_rows} prompts)")
        self._start_learner()
        for index in range(config.rollout.num_actors):
            self._start_actor(f"actor-{index}")
        self._watch_status()

    def _start_learner(self) -> None:
        handle = self._services.start_learner()
        self._expect("learner")
        self._watch(handle.start.remote(), self._on_learner_started)

    def _on_learner_started(self, ref: ray.ObjectRef) -> None:
        self._starting.pop("learner")
        started: StartRecord | None = self._learner_result(ref)
        if started is None:
            return
        self._learner_ready = True
        self._updates, self._version = started.completed_updates, started.version
        self._evaluations.went_back(self._updates)
        source = f"restored from {started.checkpoint}" if started.checkpoint else "starting model"
        self._event(
            f"learner ready: {started.num_parameters:,} parameters, {started.num_trainable:,} trained, "
            f"version {started.version}, {source}"
        )
        self._last_progress = self._clock()
        self._next_step()

    def _start_actor(self, place: str) -> None:
        """`place` is taken by one actor after the other; an id is never used twice, so that a dead one's calls void."""
        restarts = self._restarts.get(place, 0)
        actor_id = f"{place}.{restarts}" if restarts else place
        handle = self._services.start_actor(actor_id)
        self._expect(actor_id)
        self._watch(handle.start.remote(), lambda ref: self._on_actor_started(place, actor_id, handle, ref))

    def _on_actor_started(self, place: str, actor_id: str, handle: ActorHandle, ref: ray.ObjectRef) -> None:
        self._starting.pop(actor_id)
        try:
            process_id = ray.get(ref)
        except RayError as error:
            self._replace_actor(place, actor_id, error)
            return
        self._event(f"{actor_id} ready (process {process_id})")
        self._running.append(actor_id)
        self._watch(handle.run.remote(), lambda ref: self._on_actor_ended(place, actor_id, ref))

    # Failures

    def _on_actor_ended(self, place: str, actor_id: str, ref: ray.ObjectRef) -> None:
        if actor_id in self._running:
            self._running.remove(actor_id)
        try:
            ray.get(ref)
        except RayError as error:
            self._replace_actor(place, actor_id, error)

    def _replace_actor(self, place: str, actor_id: str, error: RayError) -> None:
        """Start another in its place, or end the run with the error when a restart would not help."""
        if not replaceable(error):
            raise named(error, actor_id) from error
        self._services.end(actor_id)
        lost = self._get(self._services.alive["buffer"].lose_actor.remote(actor_id), "buffer")
        self._schedule_restart(place, cause_of(error), f"{lost} leases went back")

    def _schedule_restart(self, name: str, cause: BaseException, consequence: str) -> None:
        limits = self._config.supervision
        count = self._restarts.get(name, 0)
        if count >= limits.max_restarts:
            raise RunFailedError(
                f"{name} died {count + 1} times (supervision.max_restarts = {limits.max_restarts}); "
                f"the last time: {cause}"
            )
        self._restarts[name] = count + 1
        self._exporter.restarted(name)
        pause = limits.restart_backoff_s * 2**count
        self._restart_at[name] = self._clock() + pause
        self._event(f"{name} died ({first_line(cause)}): {consequence}, replacement {count + 1} in {pause:.0f} s")

    def _learner_result(self, ref: ray.ObjectRef) -> Any:
        """Result of a learner call; none when the learner's process died and will be replaced."""
        try:
            return ray.get(ref, timeout=SAVE_LIMIT_S)
        except RayError as error:
            if not died(error):
                raise named(error, "learner") from error
            self._learner_ready = False
            self._services.end("learner")
            self._schedule_restart("learner", error, "going back to the newest checkpoint")
            return None

    # Training

    def _next_step(self) -> None:
        if self._stop_requested():
            self._end("stopped")
        elif self._nothing_to_learn:
            self._end(self._nothing_to_learn)
        elif self._updates >= self._config.max_updates:
            self._end("all updates done")
        else:
            handle = self._services.alive["learner"]
            self._watch(handle.step.remote(STEP_WAIT_S), self._on_step)

    def _on_step(self, ref: ray.ObjectRef) -> None:
        record: StepRecord | None = self._learner_result(ref)
        if not self._learner_ready:
            return
        if record is not None:
            self._record_step(record)
        if self._data_ended(record):
            self._end("end of data")
        else:
            self._next_step()

    def _data_ended(self, record: StepRecord | None) -> bool:
        if record is not None and not record.is_last:
            return False
        status: BufferStatus = self._get(self._services.alive["buffer"].status.remote(), "buffer")
        self._refuse_fatal(status)  # else a run whose samples all failed would seem to be at the end of its data
        if status.end_of_data and not self._trained and not self._updates:
            raise RunFailedError("the data ended before anything was learned: look at `slipstream rollouts`")
        return status.end_of_data

    def _record_step(self, record: StepRecord) -> None:
        self._last_progress = self._clock()
        self._updates, self._version = record.completed_updates, record.version
        line = update_record(record, self._status, time_s=self._elapsed())
        self._run_dir.record(line)
        self._progress.update(line)
        self._exporter.update(line)
        self._nothing_to_learn = self._signal.see(line)
        self._note_checkpoint(record.checkpoint)
        self._why_no_update = record.reason
        if record.outcome is BatchOutcome.NO_UPDATE:  # at once: the next status may be several such batches away
            self._refuse_fatal(self._get(self._services.alive["buffer"].status.remote(), "buffer"))
        else:
            self._trained = True

    def _refuse_fatal(self, status: BufferStatus) -> None:
        """End the run if the buffer says that it cannot make progress, with the learner's reason where it has one."""
        if status.fatal and self._why_no_update:
            raise RunFailedError(
                f"{status.fatal}; the last because {self._why_no_update}: if numbers grew beyond measure, lower "
                "learner.learning_rate"
            )
        if status.fatal:
            raise RunFailedError(status.fatal)

    def _end(self, reason: str) -> None:
        """No further step: save, evaluate what was reached, then stop the loop."""
        self._progress.phase("saving the last checkpoint")
        folder = self._learner_result(self._services.alive["learner"].save.remote())
        if not self._learner_ready:
            return  # it died, and what it had not saved is trained once more
        self._note_checkpoint(folder)
        self._ending = reason
        self._last_progress = self._clock()
        self._get(self._services.alive["buffer"].stop_issuing.remote(), "buffer")
        if self._held_out and reason != "stopped":
            self._progress.phase("evaluating the final weights")

    def _note_checkpoint(self, folder: str) -> None:
        if folder and folder != self._checkpoint:
            self._checkpoint = folder
            self._event(f"checkpoint {folder}")

    # Evaluation

    def _evaluate_if_due(self) -> None:
        """Start the evaluation that is due, on the next running actor, one at a time."""
        if not self._running or not self._learner_ready or self._ending == "stopped":
            return
        updates = self._updates
        if not self._evaluations.due(updates, final=bool(self._ending)):
            return
        actor_id = self._running[updates % len(self._running)]
        self._evaluations.start(updates)
        call = self._services.alive[actor_id].evaluate.remote(
            list(self._held_out), self._version, self._config.evaluation.temperature, self._config.seed
        )
        self._watch(call, lambda ref: self._on_evaluated(updates, ref))

    def _on_evaluated(self, update: int, ref: ray.ObjectRef) -> None:
        try:
            result: EvaluationResult = ray.get(ref)
        except RayError as error:
            if not replaceable(error):
                raise named(error, "evaluation") from error
            self._evaluations.lost()  # with its actor, which is replaced; another one takes it
            return
        self._evaluations.finished()
        self._last_progress = self._clock()
        record = evaluation_record(result, update=update, time_s=self._elapsed())
        self._run_dir.record(record)
        self._progress.evaluation(record)
        self._exporter.evaluation(record)

    # Housekeeping

    def _housekeeping(self) -> None:
        now = self._clock()
        for name in [name for name, at in self._restart_at.items() if at <= now]:
            del self._restart_at[name]
            self._start_learner() if name == "learner" else self._start_actor(name)
        if self._status_at is not None and now >= self._status_at:
            self._watch_status()
        self._evaluate_if_due()
        if self._stop_requested() and not self._learner_ready:
            self._ending = "stopped"  # nothing to save that is not in the newest checkpoint
        if self._ending:
            self._done = self._stop_requested() or self._evaluations.complete(self._updates)
        for name in (name for name, limit in self._starting.items() if now > limit):
            seconds = self._config.supervision.start_time_limit_s
            raise RunFailedError(f"{name} was not ready within {seconds:.0f} s (supervision.start_time_limit_s)")
        limit = self._config.supervision.stall_limit_s
        if now - self._last_progress > limit and self._ending:
            self._event(f"warning: the last evaluation did not end within {limit:.0f} s and is left out")
            self._done = True
        elif now - self._last_progress > limit:
            missing = self._get(self._services.alive["buffer"].missing.remote(), "buffer")
            raise RunFailedError(f"no batch was finished for {limit:.0f} s (supervision.stall_limit_s): {missing}")

    def _expect(self, name: str) -> None:
        self._starting[name] = self._clock() + self._config.supervision.start_time_limit_s

    def _watch_status(self) -> None:
        self._status_at = None
        self._watch(self._services.alive["buffer"].status.remote(), self._on_status)

    def _on_status(self, ref: ray.ObjectRef) -> None:
        status: BufferStatus = self._get(ref, "buffer")
        self._status = status
        self._progress.status(status, running=tuple(self._running))
        self._exporter.status(status, running=tuple(self._running))
        self._refuse_fatal(status)
        self._status_at = self._clock() + STATUS_EVERY_S

    def _get(self, ref: ray.ObjectRef, service: str, limit_s: float = 60.0) -> Any:
        try:
            return ray.get(ref, timeout=limit_s)
        except RayError as error:
            raise named(error, service) from error

    def _watch(self, ref: ray.ObjectRef, handler: Callable[[ray.ObjectRef], None]) -> None:
        self._pending[ref] = handler

    def _event(self, text: str) -> None:
        log.info(text)
        self._progress.event(text)
        self._run_dir.record({"kind": "event", "time_s": self._elapsed(), "text": text})

    def _elapsed(self) -> float:
        return round(self._clock() - self._began, 3)
