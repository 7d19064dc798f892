"""Parts of the learner's step that a recipe switches on, and combinations that are refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import RunConfig
from common.config_load import load_config
from common.errors import ConfigError
from common.run_metrics import masked_name
from common.types import BatchOutcome, FinishReason, GroupId, SampleId, Trajectory, Turn
from learner.health import CELLS, count_masked, describe_masked
from learner.importance import Surrogate
from learner.optimizer import block_of
from learner.recipes import recipe_settings
from learner.update import Learner
from tests.learner_kit import make_config, model_logprobs, random_batch, save_model, trajectory, with_recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


def learner_of(folder: Path, recipe: str, *overrides: str) -> Learner:
    return Learner(make_config(recipe, *overrides), folder)


def pair(rewards: tuple[float, float] = (1.0, 0.0), **changes: Any) -> list[Trajectory]:
    return [
        trajectory([5, 6 + n, 7, 8], [0, 1, 1, 1], reward=reward, group_id=GroupId(0), sample_id=SampleId(n), **changes)
        for n, reward in enumerate(rewards)
    ]


# --- several updates on a batch ---


def test_updates_are_counted_and_a_batch_is_cut_by_sample_id(folder: Path) -> None:
    words = ("groups.size=2", "algorithm.minibatches=2", "algorithm.epochs=3", "algorithm.trust_region=soft_gate")
    learner = learner_of(folder, "grpo", *words)
    batch = random_batch(np.random.default_rng(0), learner.policy.model, size=6, group_size=2)
    metrics = learner.update(batch, 6).metrics
    assert (learner.completed_updates, metrics["policy/updates"]) == (6, 6.0)
    assert metrics["policy/tokens"] == 3 * metrics["batch/sampled_tokens"]


def test_more_minibatches_than_trajectories_are_as_many_as_there_are(folder: Path) -> None:
    learner = learner_of(folder, "grpo", "groups.size=2", "algorithm.minibatches=7")
    assert learner.update(with_recorded(pair(), learner.policy.model), 0).outcome is BatchOutcome.COMMITTED
    assert learner.completed_updates == 2


def test_a_clip_acts_from_the_second_update_on_a_batch(folder: Path) -> None:
    masked = []
    for epochs in (1, 4):
        words = (f"algorithm.epochs={epochs}", "groups.size=2", "learner.learning_rate=0.01")
        learner = learner_of(folder, "grpo", *words)
        masked.append(learner.update(with_recorded(pair(), learner.policy.model), 0).metrics["policy/masked_tokens"])
    assert masked[0] == 0 < masked[1]


def test_a_minibatch_without_a_usable_token_is_passed_over(folder: Path) -> None:
    words = ("groups.size=2", "algorithm.minibatches=2")
    learner = learner_of(folder, "grpo", *words)
    fresh, stale = with_recorded(pair(), learner.policy.model)
    fresh = dataclasses.replace(fresh, weight_versions=np.where(fresh.loss_mask, np.int32(9), np.int32(-1)))
    assert learner.update([fresh, stale], 9).outcome is BatchOutcome.COMMITTED
    assert learner.completed_updates == 1


# --- the rest of the components ---


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm.kl_in=loss", "algorithm.kl_estimator=k2"),
        ("algorithm.kl_in=loss", "algorithm.kl_estimator=k3"),
        ("algorithm.kl_in=loss", "algorithm.kl_estimator=k1", "algorithm.kl_corrected=true"),
        ("algorithm.kl_in=reward", "algorithm.kl_estimator=k1"),
    ],
    ids=" ".join,
)
def test_a_divergence_term_brings_the_policy_back(folder: Path, words: tuple[str, ...]) -> None:
    """F-15: rewards 0, of a policy that has gone astray; without the term it stays there."""
    distances = {}
    for coefficient in (1e-12, 0.3):
        astray = ("algorithm.whitening=none", "algorithm.minibatches=1", f"algorithm.kl_coefficient={coefficient}")
        learner = learner_of(folder, "reinforce++", *astray, *words)
        with torch.no_grad():
            for parameter in learner.policy.model.parameters():
                parameter.mul_(1.6)
        rng = torch.Generator().manual_seed(0)
        for _ in range(15):
            logprobs = next_logprobs(learner)
            tokens = torch.multinomial(logprobs.exp(), 64, replacement=True, generator=rng).tolist()
            batch = [
                trajectory([5, t], [0, 1], reward=0.0, rollout_logprobs=[0.0, min(0.0, float(logprobs[t]))])
                for t in tokens
            ]
            learner.update(batch, 0)
        distances[coefficient] = kl_to_start(learner, folder)
    assert distances[0.3] < 0.7 * distances[1e-12]


@torch.no_grad()
def next_logprobs(learner: Learner) -> torch.Tensor:
    """Of the token after 5."""
    return learner.policy.model(input_ids=torch.tensor([[5]])).logits[0, -1].log_softmax(-1)


def kl_to_start(learner: Learner, folder: Path) -> float:
    own, first = next_logprobs(learner), next_logprobs(learner_of(folder, "grpo", "groups.size=2"))
    return float((own.exp() * (own - first)).sum())


def test_the_penalty_on_length_is_dapos(folder: Path) -> None:
    """Limit 16 tokens, the last quarter is penalised: 14 tokens lose 0.5, 16 lose 1."""
    words = ("algorithm.overlong_share=0.25", "algorithm.drop_uninformative=false", "groups.size=2")
    learner = learner_of(folder, "dapo", *words)
    batch = [
        trajectory([5] * (n + 1), [0] + [1] * n, reward=1.0, group_id=GroupId(0), sample_id=SampleId(n))
        for n in (12, 14, 16)
    ]
    metrics = learner.update(with_recorded(batch, learner.policy.model), 0).metrics
    assert metrics["batch/overlong_penalty_mean"] == pytest.approx(-0.5)
    assert metrics["batch/reward_mean"] == pytest.approx(0.5)


def test_groups_that_teach_nothing_leave_the_denominator_too(folder: Path) -> None:
    with_them, without = (learner_of(folder, "dapo", "groups.size=2") for _ in range(2))
    taught = with_recorded(pair(), without.policy.model)
    equal = [dataclasses.replace(t, group_id=GroupId(1), reward=1.0) for t in taught]
    left, right = without.update(taught, 0).metrics, with_them.update([*equal, *taught], 0).metrics
    assert (left["batch/dropped_uninformative"], right["batch/dropped_uninformative"]) == (0, 2)
    assert left["policy/loss"] == right["policy/loss"]
    assert left["policy/tokens"] == right["policy/tokens"] == 6


def test_step_sizes_shrink_with_the_effective_number_of_trajectories(folder: Path) -> None:
    """Ratios of the sequences 1, .5, 2 and .5: 2.909 of 4 count, the step size is scaled by .852803."""
    learner = learner_of(folder, "vcpo", "groups.size=4")
    batch = [
        trajectory([5, 6 + n], [0, 1], group_id=GroupId(0), sample_id=SampleId(n), reward=float(n % 2))
        for n in range(4)
    ]
    shifts = (1.0, 0.5, 2.0, 0.5)
    batch = [
        with_recorded([t], learner.policy.model, shift=-math.log(w))[0] for t, w in zip(batch, shifts, strict=True)
    ]
    batch = [dataclasses.replace(t, rollout_logprobs=np.minimum(t.rollout_logprobs, 0)) for t in batch]
    metrics = learner.update(batch, 0).metrics
    assert metrics["policy/effective_samples_share"] == pytest.approx(0.727273, abs=1e-4)
    assert metrics["policy/learning_rate"] == pytest.approx(1e-3 * 0.852803, rel=1e-4)


def test_values_of_turns_are_learned_for_turns(folder: Path) -> None:
    """Two turns with rewards 1 and 2: the returns of their tokens are 3 and 2."""
    learner = learner_of(folder, "sao-turn-mean", "value.warmup_batches=200", "value.learning_rate=5e-3")
    batch = with_recorded(
        [trajectory([5, 6, 7, 9, 8, 8], [0, 1, 1, 0, 1, 1], turn_rewards=(1.0, 2.0), reward=3.0)], learner.policy.model
    )
    for _ in range(80):
        metrics = learner.update(batch, 0).metrics
    assert metrics["value/return_mean"] == pytest.approx(2.5)
    assert metrics["value/loss"] < 0.02


def test_offline_samples_move_nothing_and_are_counted(folder: Path) -> None:
    learner = learner_of(folder, "a-star-po", "algorithm.offline_samples=2", "learner.learning_rate=1e-2")
    batch = with_recorded(pair(), learner.policy.model)
    first = learner.update(batch, 0)
    assert (first.outcome, first.metrics["batch/offline_trajectories"]) == (BatchOutcome.VALUE_WARMUP, 2.0)
    assert learner.completed_updates == 0
    mixed = [dataclasses.replace(batch[0], prompt_id="new"), batch[1]]
    second = learner.update(mixed, 0)
    assert (second.outcome, second.metrics["batch/offline_trajectories"]) == (BatchOutcome.COMMITTED, 1.0)
    assert second.metrics["batch/trajectories"] == 1.0


# --- numbers ---


def test_tokens_without_gradient_are_told_apart() -> None:
    """Staleness 0, 3, 7 and 12; the last is fresh but corrected away."""
    surrogate = Surrogate(torch.zeros(4), torch.tensor([True, False, True, True]), torch.tensor([0.5, 0.7, -0.1, 0.0]))
    table = count_masked(
        surrogate,
        torch.tensor([0.0, 0.0, -2.0, 3.0]),
        torch.tensor([1.0, -1.0, 0.0, 1.0]),
        torch.tensor([0, 3, 7, 12]),
        fresh=torch.tensor([True, True, False, True]),
        kept=torch.tensor([True, True, False, True]),
        correction=torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )
    assert len(table) == CELLS
    assert describe_masked(table) == {
        masked_name((3, 3), "region", "high", "negative"): 1.0,
        masked_name((5, 8), "stale", "low", "negative"): 1.0,
        masked_name((9, None), "rejected", "high", "positive"): 1.0,
    }


def test_the_cosine_of_a_repeated_gradient_is_one(folder: Path) -> None:
    learner = learner_of(folder, "grpo-dis", "groups.size=2", "learner.learning_rate=1e-12")
    batch = with_recorded(pair(), learner.policy.model)
    assert "policy/grad_cosine" not in learner.update(batch, 0).metrics
    assert learner.update(batch, 0).metrics["policy/grad_cosine"] == pytest.approx(1.0, abs=1e-5)
    opposite = [dataclasses.replace(t, reward=1.0 - (t.reward or 0.0)) for t in batch]
    assert learner.update(opposite, 0).metrics["policy/grad_cosine"] == pytest.approx(-1.0, abs=1e-5)


def test_a_steps_size_is_measured_against_the_band(folder: Path) -> None:
    learner = learner_of(folder, "grpo", "groups.size=2", "algorithm.eps_low=0.2", "algorithm.eps_high=0.2")
    batch = with_recorded(pair(), learner.policy.model)
    before = np.concatenate([model_logprobs(learner.policy.model, t.token_ids)[1:] for t in batch])
    metrics = learner.update(batch, 0).metrics
    after = np.concatenate([model_logprobs(learner.policy.model, t.token_ids)[1:] for t in batch])
    moved = after - before
    assert metrics["policy/step_log_ratio_max"] == pytest.approx(np.abs(moved).max(), rel=1e-3)
    assert metrics["policy/step_log_ratio_mean"] == pytest.approx(np.abs(moved).mean(), rel=1e-3)
    over = np.where(moved > 0, moved / math.log(1.2), moved / math.log(0.8)).max()
    assert metrics["policy/step_over_bound_max"] == pytest.approx(over, rel=1e-3)


def test_gradient_norms_of_blocks_add_up(folder: Path) -> None:
    learner = learner_of(folder, "sao-full-value", "learner.micro_batch_tokens=64")
    metrics = learner.update(random_batch(np.random.default_rng(0), learner.policy.model), 6).metrics
    parts = [value for name, value in metrics.items() if name.startswith("value/grad_norm_")]
    assert len(parts) == 5
    assert math.hypot(*parts) == pytest.approx(metrics["value/grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("trunk.layers.0.self_attn.q_proj.weight", "attention"),
        ("trunk.layers.0.mlp.down_proj.weight", "mlp"),
        ("trunk.embed_tokens.weight", "embeddings"),
        ("trunk.layers.1.input_layernorm.weight", "norm"),
        ("head.bias", "head"),
    ],
)
def test_a_parameter_belongs_to_a_block_by_its_modules(name: str, block: str) -> None:
    assert block_of(name) == block


def test_value_bias_is_told_by_place(folder: Path) -> None:
    """Values start at 0, and each of three tokens earns 1: the returns are 3, 2 and 1."""
    learner = learner_of(folder, "sao")
    turns = tuple(Turn(start=n, stop=n + 1, finish_reason=FinishReason.STOP, reward=1.0) for n in (1, 2, 3))
    batch = [dataclasses.replace(trajectory([5, 6, 7, 8], [0, 1, 1, 1], reward=3.0), turns=turns)]
    metrics = learner.update(with_recorded(batch, learner.policy.model), 0).metrics
    biases = [metrics[f"value/bias_{third}_third"] for third in ("first", "middle", "last")]
    assert biases == pytest.approx([-3.0, -2.0, -1.0])


# --- what is refused ---


@pytest.mark.parametrize(
    ("recipe", "words", "says"),
    [
        ("grpo", ["algorithm.advantage=gae"], 'algorithm.advantage = "gae" needs a value function'),
        ("sao", ["algorithm.advantage=hybrid"], 'algorithm.advantage = "hybrid" compares members of a group'),
        ("ppo", ["algorithm.advantage=return"], 'algorithm.value = "own_model" is not used by'),
        ("sao", ["algorithm.drop_uninformative=true"], "algorithm.drop_uninformative drops groups"),
        ("a-star-po", ["algorithm.offline_samples=0"], "set algorithm.offline_samples to 1 or more"),
        ("ppo", ["value.granularity=turn_mean"], "value.clip_range = 0.2 is for values of tokens"),
        ("grpo", ["algorithm.loss=implicit_value"], 'goes with algorithm.advantage = "implicit"'),
        ("vimpo", ["algorithm.loss=policy_gradient"], 'is made by algorithm.loss = "implicit_value"'),
        ("a-star-po", ["algorithm.whitening=tokens"], "changes the target"),
        ("reinforce++", ["algorithm.kl_estimator=k3"], 'algorithm.kl_estimator = "k3" in the reward'),
        ("reinforce++", ["algorithm.kl_in=loss"], 'algorithm.kl_estimator = "k1" in the loss has no gradient'),
        ("sao", ["algorithm.correction=truncated"], "weights every token twice"),
        ("dppo", ["algorithm.level=sequence"], "bounds the probability of a token"),
        ("sapo", ["algorithm.bounds=balanced"], "searches bounds of a clip"),
        ("sao", ["algorithm.bounds=staleness_table"], "needs algorithm.eps_table"),
        ("gspo", ["algorithm.bounds=staleness_linear"], "keeps or drops whole sequences"),
        ("tis", ["algorithm.correction_low=3.0"], "nothing lies between them"),
        ("m2po", ["algorithm.second_moment=none"], "trains on stale tokens without any correction"),
        ("hybrid-grpo", ["algorithm.length_stop=bootstrap"], "is not defined for"),
        ("vimpo", ["algorithm.policy_lambda=length_adaptive"], "λ by length"),
        ("a-star-po", ["algorithm.minibatches=0"], "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_combinations_without_sense_are_refused_with_the_reason(recipe: str, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(recipe, *words)
    assert says in str(caught.value)


def load(recipe: str, *words: str) -> RunConfig:
    return load_config(None, [f"recipe={recipe}", *words], recipes=recipe_settings())
