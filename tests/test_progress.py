"""What a person sees: nothing silent for long, every number of a batch, a clock that moves."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from buffer.records import Events, Totals
from buffer.status import BufferStatus
from common.config_load import validate
from common.types import DropReason, LedgerCounts
from deploy.progress import LINE_EVERY_S, SILENCE_S, START_SILENCE_S, Progress, sparkline, warnings


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(*, terminal: bool = False, **settings: Any) -> tuple[Progress, Clock, io.StringIO]:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, soft_wrap=True, no_color=True)
    config = validate({"max_updates": 50, **settings})
    return Progress(config, console=console, clock=clock), clock, out


def record(update: int, time_s: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "update",
        "outcome": "committed",
        "update": update,
        "time_s": time_s,
        "batch/reward_mean": 0.5,
        "batch/trajectories": 64,
        "batch/sampled_tokens": 320,
        "staleness/mean": 1.25,
        "staleness/max": 3,
        "policy/tokens": 320,
        "policy/masked_tokens": 6,
        "policy/rejected_tokens": 2,
        **more,
    }


def make_status(**changes: Any) -> BufferStatus:
    counts = LedgerCounts(
        issued=2000,
        queued=1,
        leased=60,
        assembling=2,
        ready=10,
        in_training=64,
        trained=1860,
        dropped={DropReason.STALE: 3},
    )
    fields: dict[str, Any] = {
        "counts": counts,
        "version": 30,
        "highest_version": 30,
        "live_samples": 137,
        "ready_units": 10,
        "admission_limit": 320,
        "admission_room": 183,
        "num_actors": 2,
        "held_bytes": 1,
        "open_batch": 30,
        "batches": {},
        "batches_kept": 1,
        "prompts_left": None,
        "events": Events(),
        "sampled": Totals(),
        "trained": Totals(),
        "dropped": {},
        "no_update_in_a_row": 0,
        "failed_prompts": (),
        "beyond_bound": {},
        "oldest_lease_s": 0.0,
        "fatal": None,
        "end_of_data": False,
    }
    return BufferStatus(**{**fields, **changes})


def lines(out: io.StringIO) -> list[str]:
    return [line.strip() for line in out.getvalue().splitlines()]


def screen(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120, record=True, no_color=True)
    console.print(progress.render())
    return console.export_text()


# A log


def test_log_line_of_a_batch_has_every_number() -> None:
    progress, clock, out = make()
    progress.update(record(1, 20.0))
    clock.now += LINE_EVERY_S
    progress.update(record(2, 22.0))
    assert lines(out) == [
        "0 s  update 1/50  reward 0.500  staleness 1.2 (sampled up to 3 versions ago)  masked 1.9%  too stale 0.6%",
        "5 s  update 2/50  reward 0.500  32 trajectories/s  160 tokens/s  "
        "staleness 1.2 (sampled up to 3 versions ago)  masked 1.9%  too stale 0.6%",
    ]


def test_log_lines_of_batches_are_throttled_but_for_the_first_and_the_last() -> None:
    progress, clock, out = make(max_updates=30)
    for update in range(1, 31):
        clock.now += LINE_EVERY_S / 10
        progress.update(record(update, clock.now))
    assert [line.split("update ")[1].split()[0] for line in lines(out)] == ["1/30", "11/30", "21/30", "30/30"]


def test_log_names_batches_without_update_and_their_missing_numbers_are_left_out() -> None:
    progress, _, out = make()
    progress.update(
        {"update": 0, "outcome": "value_warmup", "time_s": 3.0, "batch/reward_mean": None, "policy/tokens": 0}
    )
    assert lines(out) == ["0 s  update 0/50  (value warmup)"]


def test_log_shows_phases_events_and_evaluations_at_once() -> None:
    progress, clock, out = make()
    progress.phase("starting Ray")
    clock.now += 65
    progress.event("actor-0 ready [pid 7]")
    progress.evaluation({"update": 20, "eval/reward_mean": 0.75, "eval/count": 128})
    progress.evaluation({"update": 40, "eval/reward_mean": None})
    assert lines(out) == [
        "0 s  starting Ray",
        "1 min 05 s  actor-0 ready [pid 7]",
        "1 min 05 s  held-out reward 0.750 of update 20 (128 prompts)",
        "1 min 05 s  evaluation of update 40: no prompt could be scored",
    ]


def test_silence_is_broken_by_what_is_going_on() -> None:
    progress, clock, out = make()
    progress.phase("starting the learner")
    clock.now += START_SILENCE_S - 1
    progress.tick()
    assert len(lines(out)) == 1
    clock.now += 1
    progress.tick()
    progress.tick()
    assert lines(out)[1:] == ["5 s  … starting the learner, 5 s so far"]
    progress.update(record(1, 20.0))
    progress.status(make_status(), ["actor-0"])
    clock.now += SILENCE_S - 1
    progress.tick()
    assert lines(out)[-1].startswith("5 s  update 1/50")
    clock.now += 1
    progress.tick()
    assert lines(out)[-1] == (
        "20 s  … training, 15 s so far; buffer: 61 generating · 12 waiting · 64 in training · 1,860 trained · "
        "3 dropped; actors: 1 of 2 running: actor-0"
    )


def test_log_watches_for_silence_by_itself_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(Progress, "tick", lambda self: ticked.set())
    progress, _, _ = make()
    before = threading.active_count()
    with progress:
        assert ticked.wait(30)
    assert threading.active_count() == before


# A terminal


def test_screen_shows_the_whole_state() -> None:
    progress, clock, _ = make(terminal=True)
    progress.phase("starting")
    for update in range(1, 11):
        clock.now += 2
        progress.update(record(update, 2.0 * update, **{"batch/reward_mean": update / 10}))
    progress.evaluation({"update": 0, "eval/reward_mean": 0.25})
    progress.evaluation({"update": 10, "eval/reward_mean": 0.875})
    progress.status(make_status(failed_prompts=("sort/3",)), ["actor-0", "actor-1"])
    text = screen(progress)
    for expected in (
        "training",
        "10/50",
        "about 1 min 20 s left",
        "1.000  ▁▂▃▄▅▅▆▇██",
        "0.250 → 0.875  of update 10",
        "32 trajectories/s  160 tokens/s  staleness 1.2 (sampled up to 3 versions ago)  masked 1.9%  too stale 0.6%",
        "61 generating · 12 waiting · 64 in training",
        "2 of 2 running: actor-0, actor-1",
        "1 prompt failed at every attempt, the latest: sort/3",
    ):
        assert expected in text, expected


def test_screen_before_the_first_batch_shows_phase_and_time() -> None:
    progress, clock, _ = make(terminal=True)
    progress.phase("starting Ray")
    clock.now += 3
    elapsed, _, _, *phase = screen(progress).split()  # a spinner in between
    assert (elapsed, phase) == ("3", ["starting", "Ray", "3", "s"])


def test_events_stay_above_the_live_view_which_is_left_as_it_ended() -> None:
    progress, _, out = make(terminal=True)
    with progress:
        progress.phase("starting Ray")
        progress.event("actor-0 ready")
        progress.update(record(1, 2.0))
    text = out.getvalue()
    assert "actor-0 ready" in text
    assert text.rindex("training") > text.index("actor-0 ready")
    assert "update 1/50" not in text  # the view shows it; lines are for logs


def test_numbers_that_are_zero_are_left_out() -> None:
    progress, _, out = make()
    nothing = {"staleness/mean": 0.0, "staleness/max": 0, "policy/masked_tokens": 0, "policy/rejected_tokens": 0}
    progress.update(record(1, 20.0, **nothing))
    assert lines(out) == ["0 s  update 1/50  reward 0.500  staleness 0.0"]


def test_screen_at_the_end_shows_what_was_reached_and_nothing_under_way() -> None:
    progress, _, _ = make(terminal=True, max_updates=2)
    with progress:
        progress.update(record(1, 2.0))
        progress.update(record(2, 4.0))
        progress.status(make_status(failed_prompts=("sort/3",)), ["actor-0", "actor-1"])
        progress.phase("writing the report")
        assert " left" not in screen(progress)  # nothing is
    text = screen(progress)
    assert text.split()[:3] == ["0", "s", "done"]
    assert "2/2" in text
    assert "1 prompt failed at every attempt" in text
    for gone in ("writing the report", " left", "running", "generating"):
        assert gone not in text, gone


def test_finished_bar_has_a_colour_on_a_terminal_of_sixteen() -> None:
    progress, _, _ = make(terminal=True, max_updates=1)
    progress.update(record(1, 2.0))
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system="standard")
    console.print(progress.render())
    assert "\x1b[32m━" in out.getvalue()


def test_error_inside_leaves_the_terminal_usable() -> None:
    progress, _, out = make(terminal=True)
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    assert "failed" in screen(progress)
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


def test_numbers_of_the_goal_are_left_out_without_a_config() -> None:
    progress = Progress(console=Console(file=io.StringIO()), clock=Clock())
    progress.update(record(3, 1.0))
    progress.status(make_status(), ["actor-0"])
    assert progress.update_line().startswith("update 3  reward")
    assert "1 running: actor-0" in screen(progress)


# Parts


def test_sparkline_of_shares_has_a_fixed_scale() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.4, 0.45]) == "▄▄"


def test_sparkline_of_other_numbers_spans_them() -> None:
    assert sparkline([-3.0, 0.0, 5.0]) == "▁▄█"
    assert sparkline([7.0, 7.0]) == "▁▁"
    assert sparkline([]) == ""


def test_warnings_name_what_to_look_at() -> None:
    assert warnings(make_status()) == []
    found = warnings(make_status(beyond_bound={"a/1": 2, "b/2": 5}, no_update_in_a_row=2))
    assert found == [
        "too slow for the staleness bound: 2 prompts, b/2 5 times",
        "batches without an update, one after the other: 2",
    ]
