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
# Rows all of whose components other rows have too.
CLOSE = {"sao-one-value-update", "sao-full-value", "sao-turn-last", "sao-clip", "vc-ppo", "clip-higher", "dr-grpo"}
CLOSE |= {"gspo-token", "decoupled-ppo", "reinforce++-baseline"}
every_recipe = pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.slow) if name in CLOSE else name for name in RECIPES]
)
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


# --- what holds for all of them ---


def assert_same_step(first: Learner, left: UpdateResult, second: Learner, right: UpdateResult) -> None:
    assert left.outcome is right.outcome is BatchOutcome.COMMITTED
    assert left.metrics.keys() == right.metrics.keys()
    skipped = {name for name in left.metrics if name.startswith("time/")} | {"batch/micro_batches"}
    for name in left.metrics.keys() - skipped:
        assert left.metrics[name] == pytest.approx(right.metrics[name], rel=1e-3, abs=2e-5), name
    optimizers = [(first.optimizer, second.optimizer), (first.value_optimizer, second.value_optimizer)]
    for one, other in optimizers:
        if one and other:
            moments = other.tensors()
            for name, moment in one.tensors().items():
                torch.testing.assert_close(moments[name], moment, rtol=2e-3, atol=2e-5, msg=name)


@every_recipe
def test_the_cut_the_layout_and_the_order_change_nothing(folder: Path, recipe: str) -> None:
    """F-11, F-12: one micro-batch of rows; small packs in chunks of 3 positions, trajectories shuffled."""
    words = ("learner.micro_batch_tokens=30", "learner.layout=packed", "learner.logprob_chunk_tokens=3")
    whole, parts = make_learner(folder, recipe), make_learner(folder, recipe, *words)
    prepare(whole)
    prepare(parts)
    batch = batch_for(whole)
    shuffled = [batch[index] for index in np.random.default_rng(3).permutation(len(batch))]
    left, right = whole.update(batch, VERSION), parts.update(shuffled, VERSION)
    assert left.metrics["batch/micro_batches"] < right.metrics["batch/micro_batches"]
    assert_same_step(whole, left, parts, right)


@every_recipe
def test_unscorable_and_empty_trajectories_are_as_if_they_had_not_existed(folder: Path, recipe: str) -> None:
    """F-10, F-21."""
    with_them, without = make_learner(folder, recipe), make_learner(folder, recipe)
    prepare(with_them)
    prepare(without)
    batch = batch_for(without)
    extra = [dataclasses.replace(batch[0], reward=reward) for reward in (None, math.nan, -math.inf)]
    extra.append(trajectory([5, 6], [0, 0]))
    without.update(batch, VERSION)
    assert with_them.update([*extra, *batch], VERSION).metrics["batch/unscorable"] == 4
    assert_identical(state_of(without), state_of(with_them))
    assert remembered(without) == remembered(with_them)


@every_recipe
def test_a_gradient_that_is_not_finite_moves_nothing(folder: Path, recipe: str) -> None:
    """F-09: in the last update on the batch, when the others have been made."""
    learner, undisturbed = make_learner(folder, recipe), make_learner(folder, recipe)
    for one in (learner, undisturbed):
        prepare(one)
        one.update(batch_for(one, 1), VERSION)
    before, completed, memory = state_of(learner), learner.completed_updates, remembered(learner)
    passes = passes_of_an_update(undisturbed_copy(folder, learner), batch_for(learner, 2))
    calls: list[int] = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * math.nan if len(calls) == passes else gradient

    handle = learner.policy.model.model.norm.weight.register_hook(poison)
    result = learner.update(batch_for(learner, 2), VERSION)
    handle.remove()
    assert (result.outcome, result.reason) == (BatchOutcome.NO_UPDATE, "the policy's gradient norm is nan")
    assert_identical(state_of(learner), before)
    assert (learner.completed_updates, remembered(learner)) == (completed, memory)
    for one in (learner, undisturbed):
        assert one.update(batch_for(one, 3), VERSION).outcome is BatchOutcome.COMMITTED
    assert_identical(state_of(learner), state_of(undisturbed))


def undisturbed_copy(folder: Path, learner: Learner) -> Learner:
    copy = Learner(learner.config, folder)
    prepare(copy)
    copy.update(batch_for(copy, 1), VERSION)
    return copy


def passes_of_an_update(learner: Learner, batch: Sequence[Trajectory]) -> int:
    """Backward passes through the policy."""
    calls: list[int] = []
    handle = learner.policy.model.model.norm.weight.register_hook(lambda gradient: calls.append(1))
    assert learner.update(batch, VERSION).outcome is BatchOutcome.COMMITTED
    handle.remove()
    return len(calls)


@every_recipe
def test_a_batch_that_is_too_stale_moves_nothing(folder: Path, recipe: str) -> None:
    """F-10, F-35: and the schedule waits for the next update."""
    words = ("learner.schedule=linear", "learner.warmup_updates=3", "max_updates=40")
    learner, undisturbed = make_learner(folder, recipe, *words), make_learner(folder, recipe, *words)
    prepare(learner)
    prepare(undisturbed)
    before, memory = state_of(learner), remembered(learner)
    result = learner.update(batch_for(learner), 100)
    assert (result.outcome, learner.completed_updates) == (BatchOutcome.NO_UPDATE, 0)
    assert result.reason == "every token is too stale or outside the trust region"
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert_identical(state_of(learner), before)
    assert remembered(learner) == memory
    left, right = (one.update(batch_for(one, 1), VERSION).metrics for one in (learner, undisturbed))
    assert left["policy/learning_rate"] == right["policy/learning_rate"]
    assert_identical(state_of(learner), state_of(undisturbed))


@every_recipe
@pytest.mark.parametrize("recorded", [-1e5, 0.0], ids=["overflow", "underflow"])
def test_a_ratio_without_a_number_leaves_everything_finite(folder: Path, recipe: str, recorded: float) -> None:
    """F-09: the engine gave a token e^-100000, or certainty where the learner gives e^-1000."""
    learner = make_learner(folder, recipe)
    prepare(learner)
    batch = batch_for(learner)
    broken = [
        dataclasses.replace(t, rollout_logprobs=np.where(t.loss_mask, np.float32(recorded), np.float32(0)))
        for t in batch[:3]
    ]
    result = learner.update([*broken, *batch[3:]], VERSION)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state_of(learner).values())


@every_recipe
def test_equal_rewards_teach_a_group_nothing(folder: Path, recipe: str) -> None:
    """F-16: they differ in the last bit only. F-10: and one response is a single token."""
    learner = make_learner(folder, recipe, "staleness.bound=50")
    prepare(learner)
    rewards = [0.3, 0.1 + 0.2] * 4
    batch = [
        dataclasses.replace(t, reward=reward, turns=tuple(dataclasses.replace(turn, reward=0.0) for turn in t.turns))
        for t, reward in zip(batch_for(learner), rewards, strict=True)
    ]
    batch[0] = trajectory([5, 6], [0, 1], reward=0.3, sample_id=batch[0].sample_id, prompt_id=batch[0].prompt_id)
    result = learner.update(with_recorded(batch, learner.policy.model), VERSION)
    assert all(math.isfinite(value) for value in result.metrics.values())
    compares_members = learner.config.groups.size > 1 and not learner.value
    if recipe == "dapo":
        assert (result.outcome, result.reason) == (BatchOutcome.NO_UPDATE, "the rewards of no group differ")
    elif compares_members and "kl_coefficient" not in str(RECIPES[recipe].settings) and recipe != "vimpo":
        assert result.metrics["batch/uninformative_groups"] == result.metrics["batch/groups"] == 4
        assert result.metrics["policy/grad_norm"] == 0.0


@every_recipe
def test_the_ratio_of_an_unchanged_policy_is_one(folder: Path, recipe: str) -> None:
    """F-08: nothing is masked or rejected, whatever the temperatures."""
    learner = make_learner(folder, recipe, "algorithm.minibatches=1", "staleness.bound=50")
    prepare(learner)
    metrics = learner.update(with_recorded(batch_for(learner), learner.policy.model), VERSION).metrics
    assert metrics["policy/log_ratio_abs_max"] < 1e-4
    assert metrics["policy/masked_tokens"] == metrics["policy/rejected_tokens"] == 0
    assert metrics["policy/effective_samples_share"] == pytest.approx(1.0, abs=1e-6)


@every_recipe
def test_every_metric_is_explained_and_finite(folder: Path, recipe: str) -> None:
    learner = make_learner(folder, recipe)
    prepare(learner)
    learner.update(batch_for(learner), VERSION)
    metrics = learner.update(batch_for(learner, 1), VERSION).metrics
    assert not metrics.keys() - METRICS.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert -1.0 <= metrics["policy/grad_cosine"] <= 1.0
    counted = sum(value for name, value in metrics.items() if name.startswith("masked/"))
    if recipe != "a-star-po":  # it has no ratio to be on a side of
        assert counted == metrics["policy/masked_tokens"] + metrics["policy/rejected_tokens"] > 0


@every_recipe
def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path, folder: Path, recipe: str) -> None:
    learner, restored = make_learner(folder, recipe), make_learner(folder, recipe)
    prepare(learner)
    for seed in (0, 1):
        learner.update(batch_for(learner, seed), VERSION)
    saved = CheckpointStore(tmp_path, keep=1).save(learner, last_finished_batch=BatchId(5), buffer_state={})[0]
    assert restored.restore(saved) == 5
    assert (restored.completed_updates, remembered(restored)) == (learner.completed_updates, remembered(learner))
    for one in (learner, restored):
        for seed in (2, 3):
            assert one.update(batch_for(one, seed), VERSION).outcome is BatchOutcome.COMMITTED
    assert_identical(state_of(learner), state_of(restored))
    assert remembered(learner) == remembered(restored)


@every_recipe
def test_the_policy_learns_what_is_rewarded(folder: Path, recipe: str) -> None:
    """Token 6 is rewarded after 5, token 7 is not; a second token follows either."""
    words = ("staleness.bound=50", "learner.learning_rate=3e-3", "value.learning_rate=1e-2", "algorithm.minibatches=1")
    learner = make_learner(folder, recipe, *(word for word in words if learner_has(recipe, word)))
    start = gap(learner)
    for _ in range(25):
        batch = [
            trajectory([5, token, 8], [0, 1, 1], reward=reward, group_id=GroupId(0))
            for token, reward in ((6, 1.0), (7, 0.0))
        ]
        learner.update(with_recorded(batch, learner.policy.model), 0)
    assert gap(learner) > start + 0.5


def learner_has(recipe: str, word: str) -> bool:
    return not word.startswith("value.") or "value.updates_per_batch" in RECIPES[recipe].settings


def gap(learner: Learner) -> float:
    good, bad = (float(model_logprobs(learner.policy.model, [5, token])[1]) for token in (6, 7))
    return good - bad
