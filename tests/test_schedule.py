"""F-35: the step size is a function of completed updates."""

from __future__ import annotations

import pytest

from learner.schedule import Schedule, learning_rate


def rates(schedule: Schedule, warmup: int, total: int) -> list[float]:
    return [
        learning_rate(done, peak=1.0, schedule=schedule, warmup_updates=warmup, total_updates=total)
        for done in range(total)
    ]


def test_warmup_rises_in_equal_steps_and_the_first_update_already_moves() -> None:
    assert rates("constant", warmup=4, total=6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_just_above_zero() -> None:
    assert rates("linear", warmup=2, total=6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_decay_is_half_way_down_in_the_middle() -> None:
    expected = [1.0, 0.5 + 0.25 * 2**0.5, 0.5, 0.5 - 0.25 * 2**0.5]
    assert rates("cosine", warmup=0, total=4) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4, 10, 20])
def test_every_update_of_a_run_has_a_step_above_zero(schedule: Schedule, warmup: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(schedule, warmup, total=10))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_beyond_the_end_the_step_is_zero(schedule: Schedule) -> None:
    assert learning_rate(12, peak=1.0, schedule=schedule, warmup_updates=2, total_updates=10) == pytest.approx(0.0)
