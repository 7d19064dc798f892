"""The contract of the replay buffer under anything that can happen; see `BufferMachine` for what that is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from common.types import BatchOutcome
from tests.buffer_machine import ACTORS, BufferMachine

CHECKS = (
    BufferMachine.every_sample_is_in_one_state,
    BufferMachine.no_sample_is_twice_in_the_surviving_weights,
    BufferMachine.memory_is_bounded_and_nothing_is_left_behind,
    BufferMachine.the_version_never_goes_back,
)


def random_walk(machine: BufferMachine, draw: random.Random, num_steps: int) -> None:
    """Long histories with the weights that make them rich; hypothesis finds the short and odd ones."""

    def actor() -> str:
        return draw.choice(ACTORS)

    def number(most: int) -> int:
        return draw.randint(0, most)

    steps: list[tuple[float, Callable[[], None]]] = [
        (6, lambda: machine.poll(actor(), number(9))),
        (8, lambda: machine.deliver(actor(), number(99), number(3), number(3))),
        (3, lambda: machine.deliver_most(actor(), number(9), number(3), number(3))),
        (2, lambda: machine.deliver_from_the_grave(number(99), number(3))),
        (2, lambda: machine.deliver_unscorable(actor(), number(99), draw.choice([None, float("nan"), float("inf")]))),
        (1, lambda: machine.deliver_empty(actor(), number(99))),
        (1, lambda: machine.deliver_again(number(999))),
        (2, lambda: machine.fail(actor(), number(99), draw.choice(["failed", "over_long"]), draw.random() < 0.7)),
        (1, lambda: machine.die(actor(), draw.random() < 0.5)),
        (2, lambda: machine.heartbeat(actor())),
        (4, lambda: machine.time_passes(draw.choice([1.0, 4.0, 9.0, 16.0, 61.0]), draw.random() < 0.8)),
        (5, machine.take),
        (
            6,
            lambda: (
                machine.finish(draw.choice([BatchOutcome.COMMITTED] * 6 + list(BatchOutcome))) if machine.open else None
            ),
        ),
        (1, lambda: machine.finish_a_batch_that_is_not_open(number(20) - 1)),
        (1, lambda: machine.publish_ahead() if machine.open else None),
        (1, lambda: machine.save_checkpoint() if not machine.open else None),
        (0.7, lambda: machine.learner_is_restored(draw.random() < 0.5)),
        (0.7, machine.buffer_is_killed_and_started_again),
        (0.7, machine.a_batch_can_still_form),
    ]
    weights = [weight for weight, _ in steps]
    for _, step in draw.choices(steps, weights, k=num_steps):
        step()
        for check in CHECKS:
            check(machine)


STRAGGLERS = {1: ["retry"], 4: ["retry", "close", "convert"], 8: ["retry", "close", "convert"]}


def walk_all(group_size: int, bound: int, seed: int, num_steps: int) -> None:
    """One long history for each way with stale and with late ones."""
    for on_exceeded, straggler in itertools.product(["mask", "drop", "wait"], STRAGGLERS[group_size]):
        draw = random.Random(f"{group_size} {bound} {on_exceeded} {straggler} {seed}")
        machine = type("Machine", (BufferMachine,), {"group_size": group_size, "bound": bound})()
        machine.start(
            on_exceeded=on_exceeded,
            straggler=straggler,
            units_per_batch=draw.randint(1, 3),
            rows=draw.choice([10, 40]),
            epochs=draw.choice([3, None]),
            max_attempts=draw.randint(1, 3),
            batches_in_memory=draw.choice([1, 2, 100]),
        )
        random_walk(machine, draw, num_steps)
        machine.teardown()


def run_hypothesis(group_size: int, bound: int, max_examples: int) -> None:
    machine = type("Machine", (BufferMachine,), {"group_size": group_size, "bound": bound})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("group_size", [1, 4])
def test_the_contract_holds_over_long_histories(group_size: int, bound: int) -> None:
    walk_all(group_size, bound, seed=0, num_steps=400)


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("group_size", [1, 4])
def test_the_contract_holds_whatever_happens(group_size: int, bound: int) -> None:
    run_hypothesis(group_size, bound, max_examples=8)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("group_size", [1, 4, 8])
def test_the_contract_holds_over_many_long_histories(group_size: int, bound: int) -> None:
    for seed in range(1, 10):
        walk_all(group_size, bound, seed, num_steps=1000)
    run_hypothesis(group_size, bound, max_examples=100)
