"""One learner step: against a slow version of it, whatever the cut, and when it must not happen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from common.run_metrics import METRICS
from common.types import BatchOutcome, FinishReason, GroupId, Trajectory
from learner.update import Learner, UpdateResult
from tests.learner_kit import (
    VOCAB_SIZE,
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
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def make_learner(folder: Path, recipe: str, *overrides: str) -> Learner:
    return Learner(make_config(recipe, *overrides), folder)


def batch_for(learner: Learner, seed: int = 0) -> list[Trajectory]:
    size = learner.config.groups.size
    rng = np.random.default_rng(seed)
    return random_batch(rng, learner.policy.model, size=8, group_size=size, version=VERSION)


def state_of(learner: Learner) -> Tensors:
    """Copies of everything that a step may move."""
    tensors = {f"policy/{name}": tensor for name, tensor in weights_of(learner.policy.model).items()}
    tensors |= {f"policy optimizer/{name}": tensor.clone() for name, tensor in learner.optimizer.tensors().items()}
    if learner.value and learner.value_optimizer:
        tensors |= {f"value/{name}": p.detach().clone() for name, p in learner.value.named_parameters()}
        tensors |= {f"value optimizer/{name}": t.clone() for name, t in learner.value_optimizer.tensors().items()}
    return tensors


def assert_identical(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- the whole step ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("sao", ()),
        ("sao", ("algorithm.length_stop=bootstrap", "algorithm.value_lambda=0.9", "algorithm.gamma=0.97")),
        ("sao-head", ("learner.weight_decay=0.1", "algorithm.policy_lambda=0.8")),
        ("grpo", ("learner.max_grad_norm=0.05",)),
        ("grpo-dis", ("groups.size=4", "learner.trainable_layers=1")),
    ],
)
def test_two_updates_are_those_of_the_slow_version(
    tmp_path: Path, tied: bool, recipe: str, overrides: Sequence[str]
) -> None:
    learner = make_learner(save_model(tmp_path, tied=tied), recipe, *overrides)
    slow = SlowLearner(learner.config, learner)
    for number in range(2):
        batch = batch_for(learner, seed=number)
        expected = slow.update(batch, VERSION, rate=1e-3)
        result = learner.update(batch, VERSION)
        assert result.outcome is BatchOutcome.COMMITTED
        for name, value in expected.items():
            assert result.metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
        compare_optimizer(learner.optimizer.tensors(), slow.policy_adam.first, slow.policy_adam.second)
        if learner.value_optimizer:
            compare_optimizer(learner.value_optimizer.tensors(), slow.value_adam.first, slow.value_adam.second)
    assert result.metrics["policy/rejected_tokens"] > 0  # the batch shows what it should
    if recipe != "grpo":
        assert result.metrics["policy/masked_tokens"] > 0
    # A step moves a weight by 1e-3. Where the gradient nearly cancels, float32 and float64 disagree about its size.
    slow_weights = {name: parameter.detach().float() for name, parameter in slow.model.named_parameters()}
    assert largest_difference(weights_of(learner.policy.model), slow_weights) < 5e-5


def compare_optimizer(made: Tensors, first: Tensors, second: Tensors) -> None:
    assert {name.removeprefix("exp_avg/") for name in made if name.startswith("exp_avg/")} == first.keys()
    for name in first:
        scale = float(first[name].abs().max())
        torch.testing.assert_close(made[f"exp_avg/{name}"].double(), first[name], rtol=1e-3, atol=1e-4 * scale + 1e-12)
        scale = float(second[name].max())
        torch.testing.assert_close(
            made[f"exp_avg_sq/{name}"].double(), second[name], rtol=2e-3, atol=1e-4 * scale + 1e-15
        )


CUTS = [
    ("learner.micro_batch_tokens=1",),
    ("learner.micro_batch_tokens=30",),
    ("learner.micro_batch_tokens=45", "learner.layout=packed"),
    ("learner.layout=packed",),
    ("learner.logprob_chunk_tokens=3",),
]


@pytest.mark.parametrize("recipe", ["sao", "sao-head", "grpo"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: " ".join(cut))
def test_micro_batches_layouts_and_chunks_change_nothing(folder: Path, recipe: str, cut: Sequence[str]) -> None:
    """F-11."""
    overrides = ("algorithm.length_stop=bootstrap",) if recipe == "sao" else ()
    whole, parts = make_learner(folder, recipe, *overrides), make_learner(folder, recipe, *overrides, *cut)
    batch = batch_for(whole)
    left, right = whole.update(batch, VERSION), parts.update(batch, VERSION)
    if "learner.micro_batch_tokens=1" in cut:
        assert (left.metrics["batch/micro_batches"], right.metrics["batch/micro_batches"]) == (1.0, 8.0)
    assert_same_step(whole, left, parts, right)


@pytest.mark.parametrize("recipe", ["sao", "grpo-dis"])
def test_the_order_of_trajectories_changes_nothing(folder: Path, recipe: str) -> None:
    first, second = make_learner(folder, recipe), make_learner(folder, recipe, "learner.micro_batch_tokens=30")
    batch = batch_for(first)
    shuffled = [batch[index] for index in np.random.default_rng(3).permutation(len(batch))]
    assert_same_step(first, first.update(batch, VERSION), second, second.update(shuffled, VERSION))


@pytest.mark.parametrize("recipe", ["sao", "grpo-dis"])
@pytest.mark.parametrize("padding", [5, VOCAB_SIZE - 1])
def test_what_is_in_the_padding_changes_nothing(
    folder: Path, recipe: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-12, F-28."""
    first, second = make_learner(folder, recipe), make_learner(folder, recipe)
    batch = batch_for(first)
    left = first.update(batch, VERSION)
    monkeypatch.setattr("learner.batching.PADDING_ID", padding)
    assert_same_step(first, left, second, second.update(batch, VERSION))


def assert_same_step(first: Learner, left: UpdateResult, second: Learner, right: UpdateResult) -> None:
    assert left.outcome is right.outcome is BatchOutcome.COMMITTED
    timings = {name for name in left.metrics if name.startswith("time/")} | {"batch/micro_batches"}
    assert {name: value for name, value in left.metrics.items() if name not in timings} == pytest.approx(
        {name: value for name, value in right.metrics.items() if name not in timings}, rel=1e-4, abs=1e-6
    )
    for name, moment in first.optimizer.tensors().items():  # a tenth of the gradient, and a twentieth of its square
        torch.testing.assert_close(second.optimizer.tensors()[name], moment, rtol=1e-4, atol=1e-6, msg=name)
    if first.value_optimizer and second.value_optimizer:
        for name, moment in first.value_optimizer.tensors().items():
            torch.testing.assert_close(second.value_optimizer.tensors()[name], moment, rtol=1e-3, atol=1e-6, msg=name)


def test_short_answers_do_not_weigh_more_when_cut_apart(folder: Path) -> None:
    """F-11: responses of 1 and 9 tokens; the token mean counts 10 tokens whatever the micro-batches."""
    losses = []
    for budget in (1, 1000):
        learner = make_learner(folder, "sao", f"learner.micro_batch_tokens={budget}")
        batch = [trajectory([5, 6], [0, 1]), trajectory([5, *range(10, 19)], [0] + [1] * 9)]
        learner.update(with_recorded(batch, learner.policy.model), 0)
        losses.append(learner.optimizer.tensors())
    for name in losses[0]:
        torch.testing.assert_close(losses[0][name], losses[1][name], rtol=1e-5, atol=1e-8)


# --- ratios ---


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_the_ratio_of_an_unchanged_policy_is_one_at_any_temperature(folder: Path, temperature: float) -> None:
    """F-08."""
    learner = make_learner(folder, "sao")
    batch = [dataclasses.replace(t, temperature=temperature) for t in batch_for(learner)]
    metrics = learner.update(with_recorded(batch, learner.policy.model), VERSION).metrics
    assert metrics["policy/log_ratio_abs_max"] < 1e-4
    assert metrics["policy/masked_tokens"] == 0
    assert metrics["policy/kl_behaviour"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("reward", [1.0, -1.0])
@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("recipe", ["sao", "grpo-dis"])
def test_a_token_that_moved_tenfold_since_it_was_sampled_is_masked(
    folder: Path, recipe: str, factor: float, reward: float
) -> None:
    """F-14: recorded when its probability was a tenth, or ten times, of what it is now."""
    learner = make_learner(folder, recipe, "algorithm.eps_low=0.5", "algorithm.eps_high=1.0", "groups.size=2")
    if recipe == "sao":
        learner = make_learner(folder, recipe, "algorithm.eps_low=0.5", "algorithm.eps_high=1.0")
    exact = model_logprobs(learner.policy.model, [5, 6, 7])
    moved = trajectory([5, 6, 7], [0, 1, 1], rollout_logprobs=[0, exact[1] - math.log(factor), exact[2]], reward=reward)
    still = trajectory([5, 6, 7], [0, 1, 1], rollout_logprobs=[0, *exact[1:]], reward=0.0)
    metrics = learner.update([moved, still], 0).metrics
    assert math.exp(metrics["policy/log_ratio_abs_max"]) == pytest.approx(10.0, rel=1e-3)
    side = "high" if factor > 1 else "low"
    assert metrics["policy/masked_tokens"] == metrics[f"policy/masked_{side}_tokens"] == 1


def test_a_proximal_reference_has_ratio_one_at_the_start_of_the_update(folder: Path) -> None:
    """Plain GRPO does not see that its rollouts are stale; that is what the behaviour reference is for."""
    learner = make_learner(folder, "grpo")
    metrics = learner.update(batch_for(learner), VERSION).metrics
    assert metrics["policy/masked_tokens"] == 0
    assert metrics["policy/log_ratio_abs_max"] > 0.5


def test_rejected_and_masked_tokens_leave_the_numerator_only(folder: Path) -> None:
    """F-09 (a): a token whose ratio overflows has no gradient; the other one is as if alone, denominator kept."""

    def gradient(recorded: float, version: int) -> Tensors:
        learner = make_learner(folder, "sao", "learner.max_grad_norm=1e9", "algorithm.policy_lambda=1.0")
        exact = model_logprobs(learner.policy.model, [5, 6, 7])
        batch = [trajectory([5, 6, 7], [0, 1, 1], rollout_logprobs=[0, recorded, exact[2]], versions=[0, version, 9])]
        result = learner.update(batch, 9)
        assert result.outcome is BatchOutcome.COMMITTED
        assert result.metrics["policy/masked_tokens"] + result.metrics["policy/rejected_tokens"] == 1
        return {name: t.clone() for name, t in learner.optimizer.tensors().items() if name.startswith("exp_avg/")}

    overflow, underflow, stale = gradient(-120.0, 9), gradient(-0.0001, 9), gradient(-1.0, 4)
    for name in overflow:
        assert torch.isfinite(overflow[name]).all()
        torch.testing.assert_close(overflow[name], underflow[name])
        torch.testing.assert_close(overflow[name], stale[name])


@pytest.mark.parametrize(("on_exceeded", "rejected"), [("mask", 1.0), ("drop", 0.0), ("wait", 0.0)])
def test_tokens_staler_than_the_bound_are_rejected_in_mask_mode_alone(
    folder: Path, on_exceeded: str, rejected: float
) -> None:
    learner = make_learner(folder, "sao", "staleness.bound=2", f"staleness.on_exceeded={on_exceeded}")
    batch = with_recorded([trajectory([5, 6, 7, 8], [0, 1, 1, 1], versions=[0, 6, 7, 9])], learner.policy.model)
    metrics = learner.update(batch, 9).metrics
    assert metrics["policy/rejected_tokens"] == rejected
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (pytest.approx(5 / 3), 3.0)
    assert [metrics[f"staleness/tokens_{age}"] for age in range(5)] == [1, 0, 1, 1, 0]


# --- no update ---


def poison_policy(learner: Learner) -> torch.utils.hooks.RemovableHandle:
    """NaN in one gradient of the policy."""
    return learner.policy.model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))


def poison_value(learner: Learner) -> torch.utils.hooks.RemovableHandle:
    """NaN in the gradient of the *second* value update, when the first has already been made."""
    calls = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return gradient * float("nan") if len(calls) == 2 else gradient

    assert learner.value is not None
    return dict(learner.value.named_parameters())["head.bias"].register_hook(hook)


@pytest.mark.parametrize(
    ("recipe", "poison", "reason"),
    [
        ("sao", poison_policy, "policy's gradient norm is nan"),
        ("sao", poison_value, "value function's gradient norm is nan"),
        ("sao-head", poison_policy, "policy's gradient norm is nan"),
        ("grpo", poison_policy, "policy's gradient norm is nan"),
    ],
)
def test_a_gradient_that_is_not_finite_moves_nothing(
    folder: Path, recipe: str, poison: Callable[[Learner], torch.utils.hooks.RemovableHandle], reason: str
) -> None:
    """F-09 (b): step 3 of 5 is poisoned; afterwards all goes on as if it had not been there."""
    learner, undisturbed = make_learner(folder, recipe), make_learner(folder, recipe)
    for number in range(2):
        learner.update(batch_for(learner, number), VERSION)
        undisturbed.update(batch_for(undisturbed, number), VERSION)
    before = state_of(learner)
    handle = poison(learner)
    result = learner.update(batch_for(learner, 2), VERSION)
    handle.remove()
    assert result.outcome is BatchOutcome.NO_UPDATE
    assert reason in result.reason
    assert_identical(state_of(learner), before)
    assert (learner.completed_updates, learner.value_batches) == (2, 2 if "sao" in recipe else 0)
    for number in (3, 4):
        assert learner.update(batch_for(learner, number), VERSION).outcome is BatchOutcome.COMMITTED
        undisturbed.update(batch_for(undisturbed, number), VERSION)
    assert_identical(state_of(learner), state_of(undisturbed))


@pytest.mark.parametrize("recipe", ["sao", "sao-head", "grpo-dis"])
@pytest.mark.parametrize("version", [VERSION, 100], ids=["all masked", "all stale"])
def test_a_batch_without_a_usable_token_moves_nothing(folder: Path, recipe: str, version: int) -> None:
    """F-10."""
    learner = make_learner(folder, recipe)
    learner.update(batch_for(learner), VERSION)
    before = state_of(learner)
    batch = with_recorded(batch_for(learner, 1), learner.policy.model, shift=2.5 if version == VERSION else 0.0)
    batch = [dataclasses.replace(t, rollout_logprobs=np.minimum(t.rollout_logprobs, 0)) for t in batch]
    result = learner.update(batch, version)
    assert result.outcome is BatchOutcome.NO_UPDATE
    assert result.reason == "every token is too stale or outside the trust region"
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert_identical(state_of(learner), before)
    assert learner.completed_updates == 1


@pytest.mark.parametrize("recipe", ["sao", "grpo-dis"])
def test_nothing_generated_or_nothing_scored_moves_nothing(folder: Path, recipe: str) -> None:
    """F-10, F-21."""
    learner = make_learner(folder, recipe)
    before = state_of(learner)
    empty = trajectory([5, 6], [0, 0])
    unscorable = trajectory([5, 6], [0, 1], reward=None)
    for batch in ([], [empty], [unscorable, empty]):
        result = learner.update(batch, 0)
        assert result.outcome is BatchOutcome.NO_UPDATE
        assert result.metrics["batch/unscorable"] == len(batch)
    assert_identical(state_of(learner), before)


@pytest.mark.parametrize("recipe", ["sao", "grpo-dis"])
@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_unscorable_and_empty_trajectories_are_as_if_they_had_not_existed(
    folder: Path, recipe: str, reward: float | None
) -> None:
    """F-10, F-21."""
    with_them, without = make_learner(folder, recipe), make_learner(folder, recipe)
    batch = batch_for(without)
    extra = [dataclasses.replace(batch[0], reward=reward), trajectory([5, 6], [0, 0])]
    left, right = without.update(batch, VERSION), with_them.update([*extra, *batch], VERSION)
    assert (left.metrics["batch/unscorable"], right.metrics["batch/unscorable"]) == (0, 2)
    assert_identical(state_of(without), state_of(with_them))


def test_an_answer_of_one_token_is_an_ordinary_sample(folder: Path) -> None:
    """F-10: the model stopped at once; that is what it must learn from."""
    learner = make_learner(folder, "sao")
    batch = with_recorded([trajectory([5, 2], [0, 1], reward=-1.0)], learner.policy.model)
    before = model_logprobs(learner.policy.model, [5, 2])[1]
    assert learner.update(batch, 0).outcome is BatchOutcome.COMMITTED
    assert model_logprobs(learner.policy.model, [5, 2])[1] < before


# --- groups ---


def test_groups_without_signal_are_counted_and_give_no_gradient(folder: Path) -> None:
    """F-16: rewards that differ in the last bit only, and a group of one."""
    learner = make_learner(folder, "grpo-dis", "groups.size=4")
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3, 5.0]
    batch = [
        trajectory([5, 6 + n, 7], [0, 1, 1], reward=reward, group_id=GroupId(0 if n < 4 else 1))
        for n, reward in enumerate(rewards)
    ]
    metrics = learner.update(with_recorded(batch, learner.policy.model), 0).metrics
    assert (metrics["batch/groups"], metrics["batch/uninformative_groups"]) == (2, 2)
    assert (metrics["policy/loss"], metrics["policy/grad_norm"]) == (0.0, 0.0)


def test_advantages_of_a_group_are_over_the_members_that_are_there(folder: Path) -> None:
    """F-21: rewards 1, missing, 0, 1."""
    learner = make_learner(folder, "grpo-dis", "algorithm.advantage=group_mean", "groups.size=4")
    batch = [trajectory([5, 6, 7], [0, 1, 0], reward=r, group_id=GroupId(3)) for r in (1.0, None, 0.0, 1.0)]
    metrics = learner.update(with_recorded(batch, learner.policy.model), 0).metrics
    assert metrics["policy/advantage_std"] == pytest.approx(math.sqrt((1 / 9 + 4 / 9 + 1 / 9) / 3))


@pytest.mark.parametrize("advantage", ["group_mean", "group_mean_std", "leave_one_out"])
def test_group_advantages_are_those_that_were_asked_for(folder: Path, advantage: str) -> None:
    learner = make_learner(folder, "grpo-dis", f"algorithm.advantage={advantage}", "groups.size=4")
    batch = [trajectory([5, 6, 7], [0, 1, 0], reward=r, group_id=GroupId(3)) for r in (1.0, 0.0, 0.0, 0.0)]
    metrics = learner.update(with_recorded(batch, learner.policy.model), 0).metrics
    largest = {"group_mean": 0.75, "group_mean_std": 1.499997, "leave_one_out": 1.0}[advantage]
    assert metrics["policy/advantage_std"] == pytest.approx(largest / math.sqrt(3), rel=1e-5)  # 1, and three of -1/3


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens(folder: Path) -> None:
    learner = make_learner(folder, "sao", "algorithm.whitening=tokens")
    metrics = learner.update(batch_for(learner), VERSION).metrics
    assert metrics["policy/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    n = metrics["batch/sampled_tokens"]
    assert metrics["policy/advantage_std"] == pytest.approx(math.sqrt((n - 1) / n), abs=1e-6)  # n - 1, as verl


# --- value function ---


def cut_trajectory(finish_reason: FinishReason) -> Trajectory:
    return trajectory([5, 6, 7, 8], [0, 1, 1, 1], reward=0.0, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("length_stop", "finish_reason", "advantage"),
    [
        ("bootstrap", FinishReason.LENGTH, 0.0),
        ("terminal", FinishReason.LENGTH, -0.4),
        ("bootstrap", FinishReason.STOP, -0.4),
    ],
)
def test_a_length_stop_goes_on_or_ends_as_configured(
    folder: Path, length_stop: str, finish_reason: FinishReason, advantage: float
) -> None:
    """F-13: all values 0.4, rewards 0, λ = 1."""
    words = [f"algorithm.length_stop={length_stop}", "algorithm.policy_lambda=1.0", "value.learning_rate=1e-12"]
    learner = make_learner(folder, "sao", *words)
    assert learner.value is not None
    torch.nn.init.constant_(dict(learner.value.named_parameters())["head.bias"], 0.4)
    batch = with_recorded([cut_trajectory(finish_reason)], learner.policy.model)
    metrics = learner.update(batch, 0).metrics
    assert metrics["value/mean"] == pytest.approx(0.4)
    assert metrics["policy/advantage_mean"] == pytest.approx(advantage, abs=1e-5)
    assert metrics["policy/advantage_std"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["batch/truncated_share"] == (finish_reason is FinishReason.LENGTH)


@pytest.mark.parametrize("recipe", ["sao", "sao-head"])
def test_warmup_batches_train_the_value_function_alone(folder: Path, recipe: str) -> None:
    learner = make_learner(folder, recipe, "value.warmup_batches=2", "learner.warmup_updates=4")
    before = state_of(learner)
    for number in range(2):
        result = learner.update(batch_for(learner, number), VERSION)
        assert result.outcome is BatchOutcome.VALUE_WARMUP
        assert not any(name.startswith("policy/") for name in result.metrics)
    after = state_of(learner)
    moved = {name.partition("/")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"value", "value optimizer"}
    assert learner.completed_updates == 0
    result = learner.update(batch_for(learner, 2), VERSION)
    assert result.outcome is BatchOutcome.COMMITTED
    assert result.metrics["policy/learning_rate"] == pytest.approx(1e-3 / 4)  # warm-up batches are not updates


def test_the_value_function_learns(folder: Path) -> None:
    learner = make_learner(folder, "sao", "value.warmup_batches=30", "value.learning_rate=3e-3")
    batch = batch_for(learner)
    results = [learner.update(batch, VERSION).metrics for _ in range(30)]
    assert results[0]["value/mean"] == 0.0  # the head starts at 0
    assert results[-1]["value/loss"] < 0.2 * results[0]["value/loss"]
    assert results[-1]["value/explained_variance"] > 0.8


def test_a_head_does_not_train_the_policys_trunk(folder: Path) -> None:
    learner = make_learner(folder, "sao-head", "value.warmup_batches=1")
    learner.update(batch_for(learner), VERSION)
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())


# --- the rest ---


def test_the_policy_learns_what_is_rewarded(folder: Path) -> None:
    learner = make_learner(folder, "grpo-dis", "groups.size=2", "staleness.bound=50", "learner.learning_rate=3e-3")
    start = model_logprobs(learner.policy.model, [5, 6])[1]
    for _ in range(20):
        batch = [
            trajectory([5, token], [0, 1], reward=reward, group_id=GroupId(0)) for token, reward in ((6, 1.0), (7, 0.0))
        ]
        learner.update(with_recorded(batch, learner.policy.model), 0)
    assert model_logprobs(learner.policy.model, [5, 6])[1] > start + 1.0


def test_a_step_follows_the_schedule_by_completed_updates(folder: Path) -> None:
    """F-35: a batch without an update does not advance it."""
    learner = make_learner(folder, "grpo-dis", "learner.warmup_updates=2", "learner.schedule=linear", "max_updates=4")
    rates = []
    for number in range(4):
        rates.append(learner.update(batch_for(learner, number), VERSION).metrics["policy/learning_rate"])
        assert learner.update(batch_for(learner, number), 100).outcome is BatchOutcome.NO_UPDATE
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.5e-3])


def test_an_entropy_bonus_keeps_entropy_up(folder: Path) -> None:
    learner = make_learner(folder, "grpo-dis", "algorithm.entropy_coefficient=0.1", "groups.size=2")
    rewarded_alike = [trajectory([5, 6, 7], [0, 1, 1], reward=1.0, group_id=GroupId(0)) for _ in range(2)]
    entropies = []
    for _ in range(5):
        batch = with_recorded(rewarded_alike, learner.policy.model)
        metrics = learner.update(batch, 0).metrics
        assert metrics["policy/loss"] == pytest.approx(-0.1 * metrics["policy/entropy"], rel=1e-5)
        entropies.append(metrics["policy/entropy"])
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0]


@pytest.mark.parametrize("recipe", ["sao", "sao-head", "grpo", "vimpo"])
def test_every_metric_is_explained_and_finite(folder: Path, recipe: str) -> None:
    """With the exact entropy, which no recipe asks for; test_recipe_updates.py has them all without."""
    learner = make_learner(folder, recipe, "algorithm.entropy_coefficient=0.01")
    metrics = learner.update(batch_for(learner), VERSION).metrics
    assert not metrics.keys() - METRICS.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())
    assert metrics["batch/reward_std"] > 0


def test_a_step_draws_no_random_numbers(folder: Path) -> None:
    learner = make_learner(folder, "sao")
    batch = batch_for(learner)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    learner.update(batch, VERSION)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]


def test_the_seed_decides_the_head_and_nothing_else_does(folder: Path) -> None:
    heads = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(heads))
        learner = make_learner(folder, "sao-head", f"seed={seed}")
        assert learner.value is not None
        heads.append({name: p.detach().clone() for name, p in learner.value.named_parameters()})
    assert_identical(heads[0], heads[1])
    assert not torch.equal(heads[0]["1.weight"], heads[2]["1.weight"])
