"""What is remembered of each prompt."""

from __future__ import annotations

import json
import math

import pytest

from common.algorithm_config import AlgorithmConfig
from learner.prompt_memory import PromptMemory


def memory(advantage: str, **settings: object) -> PromptMemory:
    made = PromptMemory.for_recipe(AlgorithmConfig.model_validate({"advantage": advantage, **settings}))
    assert made is not None
    return made


def baseline(made: PromptMemory, prompt: str) -> float:
    return float(made.baselines([prompt], unknown=-1.0))


def test_recipes_that_remember_nothing_have_none() -> None:
    assert PromptMemory.for_recipe(AlgorithmConfig()) is None


def test_a_running_mean_is_over_the_last_rewards_of_the_prompt() -> None:
    made = memory("running_mean", history=3)
    assert baseline(made, "a") == -1.0
    made.learn([("a", 9.0), ("b", 5.0), ("a", 1.0)])
    assert (baseline(made, "a"), baseline(made, "b")) == (5.0, 5.0)
    made.learn([("a", 0.0), ("a", 2.0)])
    assert baseline(made, "a") == 1.0  # of 1, 0 and 2


def test_a_success_rate_begins_with_offline_samples_and_forgets() -> None:
    """The numbers of SPO: 6 of 8 successes, then a reward of 1 kept with 0.875."""
    made = memory("success_rate", offline_samples=8, retention=0.875)
    made.learn([("a", 1.0)] * 6 + [("a", 0.0)])
    assert made.is_offline(["a", "b"]) == [True, True]
    made.learn([("a", 0.0)])
    assert made.is_offline(["a", "b"]) == [False, True]
    assert baseline(made, "a") == pytest.approx(0.722222, abs=1e-6)
    made.learn([("a", 1.0)])
    assert baseline(made, "a") == pytest.approx(0.756944, abs=1e-6)


def test_an_optimal_value_is_estimated_once_and_stays() -> None:
    """The numbers of A*-PO: rewards 1 0 0 0 0 1 0 0 at temperature 0.5."""
    made = memory("optimal_value", offline_samples=8)
    made.learn([("a", reward) for reward in (1.0, 0, 0, 0, 0, 1, 0, 0)])
    assert baseline(made, "a") == pytest.approx(0.477229, abs=1e-6)
    made.learn([("a", 1.0)] * 5)
    assert baseline(made, "a") == pytest.approx(0.477229, abs=1e-6)


def test_offline_samples_that_come_at_once_split_where_they_are_enough() -> None:
    made = memory("success_rate", offline_samples=2, retention=1.0)
    made.learn([("a", 1.0), ("a", 1.0), ("a", 0.0)])
    assert baseline(made, "a") == pytest.approx((8 * 2.5 / 3) / (8 + 1))


def test_moments_of_all_rewards_count_visits_and_not_members() -> None:
    made = memory("smoothed")
    made.learn([("a", 1.0), ("a", 3.0), ("b", 7.0)])
    made.learn([("a", 2.0)])
    assert made.past_moments("a") == (2, 3.0, 6.0, 14.0)
    assert made.past_moments("c") == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_rewards_that_are_no_numbers_are_not_remembered(reward: float) -> None:
    made = memory("running_mean")
    made.learn([("a", reward)])
    assert baseline(made, "a") == -1.0


def test_a_state_goes_through_json_and_belongs_to_its_kind() -> None:
    made, restored = memory("success_rate", offline_samples=1), memory("success_rate", offline_samples=1)
    made.learn([("a", 1.0), ("a", 0.1), ("b", 1 / 3)])
    restored.load_state(json.loads(json.dumps(made.state())))
    assert restored.state() == made.state()
    with pytest.raises(KeyError, match="a memory of success_rate, not of running_mean"):
        memory("running_mean").load_state(made.state())
