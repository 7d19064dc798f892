"""Every recipe's whole update: against its formulas written out, and whatever a step must keep to for all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.algorithm_config import updates_per_batch
from common.run_metrics import METRICS
from common.types import BatchId, BatchOutcome, GroupId, Trajectory
from learner.checkpoint import CheckpointStore
from learner.recipes import RECIPES
from learner.update import Learner, UpdateResult
from tests.learner_kit import (
    largest_difference,
    make_config,
    model_logprobs,
    random_batch,
    save_model,
    trajectory,
    weights_of,
    with_recorded,
)
from tests.slow_update import SlowLearner

VERSION = 6
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
OFFLINE = {"a-star-po": 1, "spo": 1}  # first samples of a prompt that are only remembered, in these tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def make_learner(folder: Path, recipe: str, *overrides: str) -> Learner:
    """Groups of 2, so that the 8 trajectories of a batch are of several prompts."""
    words = ["groups.size=2"] if RECIPES[recipe].settings.get("groups.size", 1) > 1 else []
    if recipe in OFFLINE:
        words.append(f"algorithm.offline_samples={OFFLINE[recipe]}")
    return Learner(make_config(recipe, *words, *overrides), folder)


def batch_for(learner: Learner, seed: int = 0, **settings: Any) -> list[Trajectory]:
    settings = {"size": 8, "group_size": learner.config.groups.size, "version": VERSION, **settings}
    return random_batch(np.random.default_rng(seed), learner.policy.model, **settings)


def prepare(learner: Learner) -> None:
    """Go past the samples that are only remembered; the weights rest meanwhile."""
    if learner.config.recipe in OFFLINE:
        before = weights_of(learner.policy.model)
        assert learner.update(batch_for(learner, seed=99), VERSION).outcome is BatchOutcome.VALUE_WARMUP
        assert largest_difference(before, weights_of(learner.policy.model)) == 0.0


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    tensors = {f"policy/{name}": tensor for name, tensor in weights_of(learner.policy.model).items()}
    tensors |= {f"policy optimizer/{name}": tensor.clone() for name, tensor in learner.optimizer.tensors().items()}
    if learner.value and learner.value_optimizer:
        tensors |= {f"value/{name}": p.detach().clone() for name, p in learner.value.named_parameters()}
        tensors |= {f"value optimizer/{name}": t.clone() for name, t in learner.value_optimizer.tensors().items()}
    return tensors


def remembered(learner: Learner) -> Any:
    return None if learner.memory is None else repr(learner.memory.state())


def assert_identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- the formulas ---

VARIANTS = [(recipe, ()) for recipe in RECIPES] + [
    ("sao", ("algorithm.bounds=staleness_linear", "algorithm.eps_low_stale=0.1", "algorithm.eps_high_stale=0.2")),
    ("grpo-dis", ("algorithm.bounds=staleness_table", "algorithm.eps_table=[[0.5,1.0],[0.3,0.4],[0.1,0.1]]")),
    ("grpo-dis", ("algorithm.level=sequence", "algorithm.eps_low=0.5", "algorithm.eps_high=0.5")),
    ("cispo", ("algorithm.bounds=staleness_linear", "algorithm.reference=behaviour")),
    ("grpo-dis", ("algorithm.reject_stale_sequences=true", "algorithm.epochs=2")),
    ("grpo-dis", ("algorithm.veto_ratio=0.4", "algorithm.product_ratio_band=[0.05,20.0]")),
    ("tis", ("algorithm.mean_ratio_band=[0.7,1.5]", "algorithm.max_sequence_k3=0.3")),
    ("tis", ("algorithm.correction_level=sequence", "algorithm.correction_low=0.8", "algorithm.minibatches=1")),
    ("icepop", ("algorithm.correction_level=sequence_product", "algorithm.correction_high=none")),
    ("grpo", ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k3")),
    ("rloo", ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_in=reward")),
    ("sao", ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_corrected=true")),
    ("ppo", ("algorithm.epochs=2", "algorithm.minibatches=2", "value.updates_per_batch=3")),
    ("hybrid-grpo", ("algorithm.gamma=0.9",)),
]


@pytest.mark.parametrize(
    ("recipe", "overrides"), VARIANTS, ids=lambda value: " ".join([value] if isinstance(value, str) else value)
)
def test_two_updates_are_those_of_the_formulas(folder: Path, recipe: str, overrides: Sequence[str]) -> None:
    learner = make_learner(folder, recipe, "learner.learning_rate=3e-3", *overrides)
    slow = SlowLearner(learner.config, learner)
    if recipe in OFFLINE:
        slow.update(batch_for(learner, seed=99), VERSION, rate=3e-3)
        prepare(learner)
    for number in range(2):
        batch = batch_for(learner, seed=number)
        expected = slow.update(batch, VERSION, rate=3e-3)
        result = learner.update(batch, VERSION)
        assert result.outcome is BatchOutcome.COMMITTED
        for name, value in expected.items():
            assert result.metrics[name] == pytest.approx(value, rel=2e-3, abs=1e-5), name
        compare_moments(learner.optimizer.tensors(), slow.policy_adam.first)
        if learner.value_optimizer:
            compare_moments(learner.value_optimizer.tensors(), slow.value_adam.first)
    assert learner.completed_updates <= 2 * updates_per_batch(learner.config.algorithm)


def compare_moments(made: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> None:
    """AdamW's mean gradient, relative to the largest entry of the parameter."""
    assert {name.removeprefix("exp_avg/") for name in made if name.startswith("exp_avg/")} == first.keys()
    for name in first:
        scale = float(first[name].abs().max())
        torch.testing.assert_close(made[f"exp_avg/{name}"].double(), first[name], rtol=5e-3, atol=2e-3 * scale + 1e-9)
