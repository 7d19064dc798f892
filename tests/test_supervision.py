"""When evaluations are due, and what failed Ray calls mean."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from common.config import RunConfig
from common.errors import CanaryError, ConfigError, EngineDeadError, RunFailedError, WeightUpdateError
from deploy.evaluation import EvaluationSchedule
from deploy.failures import died, named, replaceable
from deploy.placement import needed_cpus
from deploy.run_dir import Record
from deploy.signal_watch import SignalWatch


def raised(cause: Exception) -> RayTaskError:
    """As Ray hands on what a method of an actor raised."""
    return RayTaskError("run", "traceback", cause).as_instanceof_cause()


def evaluate(schedule: EvaluationSchedule, updates: int, *, final: bool = False) -> bool:
    """Run the evaluation that is due; whether there was one."""
    if not schedule.due(updates, final=final):
        return False
    schedule.start(updates)
    schedule.finished()
    return True


def test_evaluations_come_before_training_at_every_interval_and_after_the_last_update() -> None:
    schedule = EvaluationSchedule(10)
    due = [updates for updates in range(35) if evaluate(schedule, updates)]
    assert due == [0, 10, 20, 30]
    assert not schedule.complete(34)
    assert evaluate(schedule, 34, final=True)
    assert schedule.complete(34)


def test_with_interval_0_only_before_and_after() -> None:
    schedule = EvaluationSchedule(0)
    assert [updates for updates in range(9) if evaluate(schedule, updates)] == [0]
    assert evaluate(schedule, 9, final=True)


def test_without_evaluation_nothing_is_ever_due() -> None:
    schedule = EvaluationSchedule(None)
    assert not schedule.due(0, final=True)
    assert schedule.complete(0)


def test_only_one_evaluation_runs_and_a_missed_one_is_made_up_for() -> None:
    schedule = EvaluationSchedule(10)
    schedule.start(0)
    assert not schedule.due(10, final=False)
    schedule.finished()
    assert schedule.due(13, final=False)  # of the weights after 13 updates, and said to be


def test_evaluation_that_was_lost_with_its_actor_is_due_again() -> None:
    schedule = EvaluationSchedule(10)
    schedule.start(0)
    schedule.lost()
    assert schedule.due(0, final=False)


def test_after_a_restore_what_is_trained_again_is_evaluated_again() -> None:
    schedule = EvaluationSchedule(20)
    for updates in (0, 20, 40):
        assert evaluate(schedule, updates)
    schedule.went_back(20)
    assert not schedule.due(20, final=False)
    assert not schedule.complete(40)
    assert evaluate(schedule, 40, final=True)


@pytest.mark.parametrize("cause", [EngineDeadError("gone"), CanaryError("off by 3"), WeightUpdateError("refused")])
def test_engine_that_broke_is_replaced(cause: Exception) -> None:
    assert replaceable(raised(cause))
    assert not died(raised(cause))


def test_dead_process_is_replaced() -> None:
    assert replaceable(ActorDiedError())
    assert died(ActorUnavailableError("unreachable", None))


def test_death_of_the_buffer_is_not_taken_for_the_death_of_who_called_it() -> None:
    error = raised(ActorDiedError())
    assert not died(error)
    assert not replaceable(error)
    assert str(named(error, "learner")).startswith("buffer failed: ActorDiedError")


@pytest.mark.parametrize("error", [raised(ConfigError("x = 1: no")), raised(ZeroDivisionError("division by zero"))])
def test_what_a_replacement_would_meet_again_ends_the_run(error: RayTaskError) -> None:
    assert not replaceable(error)


def test_error_of_ours_is_said_as_it_is_and_any_other_names_its_service() -> None:
    assert isinstance(named(raised(ConfigError("x = 1: no")), "learner"), ConfigError)
    assert str(named(raised(ZeroDivisionError("division by zero")), "actor-1")) == (
        "actor-1 failed: ZeroDivisionError: division by zero"
    )
    assert isinstance(named(GetTimeoutError("60 s"), "buffer"), RunFailedError)


def test_cpus_of_all_services_are_counted() -> None:
    config = RunConfig.model_validate({"rollout": {"num_actors": 3}})
    assert needed_cpus(config) == pytest.approx(0.1 + 0.5 + 3 * 0.5)


def batch(groups: int, uninformative: int) -> Record:
    return {"batch/groups": groups, "batch/uninformative_groups": uninformative, "batch/reward_mean": 1.0}


def test_run_whose_rewards_never_vary_fails_within_its_bound() -> None:
    """F-16."""
    watch = SignalWatch(3)
    assert [watch.see(batch(4, 4)) for _ in range(2)] == ["", ""]
    with pytest.raises(
        RunFailedError, match="in 3 batches no group had rewards that differ.*max_uninformative_batches"
    ):
        watch.see(batch(4, 4))


def test_run_that_has_learned_ends_well_when_nothing_is_left() -> None:
    watch = SignalWatch(2)
    assert watch.see(batch(4, 3)) == ""
    assert watch.see(batch(4, 4)) == ""
    assert watch.see(batch(4, 3)) == ""  # not in a row
    assert watch.see(batch(4, 4)) == ""
    assert "nothing left to learn" in watch.see(batch(4, 4))


def test_equal_rewards_end_nothing_without_a_limit_or_without_groups() -> None:
    assert [SignalWatch(0).see(batch(4, 4)) for _ in range(50)] == [""] * 50
    single = SignalWatch(1)
    assert [single.see({"batch/reward_mean": 1.0}) for _ in range(3)] == [""] * 3
