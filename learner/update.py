"""One learner step: from a batch of trajectories to new weights, or to nothing at all."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.algorithm_config import needs_starting_model, updates_per_batch
from common.config import RunConfig
from common.types import BatchId, BatchOutcome, Trajectory
from learner.advantages import group_advantages, overlong_penalty, rewards_tensor
from learner.baselines import Evidence, compute_advantages
from learner.batching import TokenBatch, flatten, micro_batches
from learner.compute import choose_compute, choose_device, choose_layout
from learner.micro_loss import PolicyTask
from learner.optimizer import NoUpdate, Optimizer
from learner.policy import Policy
from learner.policy_learner import PolicyLearner
from learner.prompt_memory import PromptMemory
from learner.returns import kl_shaped_rewards
from learner.scoring import Scores, score_batch
from learner.segments import segment_sum
from learner.state import read_state
from learner.step_metrics import StepMetrics, Stopwatch, describe_batch
from learner.trunk import Compute
from learner.value import ValueFunction
from learner.value_learner import ValueLearner, make_value_function

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What became of a batch."""

    outcome: BatchOutcome
    metrics: dict[str, float] = field(default_factory=dict)  # names of common/run_metrics.py
    reason: str = ""  # why there was no update


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What of a batch is trained on, and what is only remembered."""

    trained: Sequence[Trajectory]
    visits: Sequence[tuple[str, float]]  # prompt and reward of all usable ones, for the memory


class Learner:
    """Policy, value function and optimizers, and the step that moves them.

    A step ends in one of three ways. Committed: the policy moved, by one optimizer update or by the several that the
    recipe makes on a batch. Value warm-up: only the value function, or the memory of prompts, moved. No update: a
    gradient is not finite, or no token is left in the policy loss; then nothing has moved, neither weights nor moments
    nor the schedule nor the memory, bit for bit.

    Nothing in a step draws random numbers.

    Raises (on construction):
        ModelError: the model folder cannot be used.
    """

    def __init__(self, config: RunConfig, model_folder: Path) -> None:
        torch.set_num_threads(config.learner.num_threads)
        self.config = config
        self.completed_updates = 0  # optimizer updates in the policy's weights
        self.weight_version = 0  # label of the policy's weights, kept by whoever publishes them
        self.value_batches = 0  # batches that the value function has learned from
        self.memory = PromptMemory.for_recipe(config.algorithm)
        self._device = choose_device(config)
        self._layout = choose_layout(config, self._device)
        compute = choose_compute(config, self._device, self._layout)
        self.policy = self._make_policy(model_folder, compute, config.learner.trainable_layers)
        self.optimizer = self._make_optimizer(self.policy.model)
        self._starting_model = self._make_starting_model(model_folder, compute)
        self.value = make_value_function(config, model_folder, compute, self.policy.trunk)
        self.value_optimizer = self._make_optimizer(self.value) if self.value else None
        self._value_learner = (
            ValueLearner(config, self.value, self.value_optimizer) if self.value and self.value_optimizer else None
        )
        self._policy_learner = PolicyLearner(config, self.policy, self._starting_model, self.optimizer, self._layout)
        algorithm = config.algorithm
        self._bootstraps = algorithm.advantage == "gae" and algorithm.length_stop == "bootstrap"

    def _make_policy(self, folder: Path, compute: Compute, trainable_layers: int | None) -> Policy:
        return Policy(
            folder,
            compute,
            trainable_layers=trainable_layers,
            logprob_chunk_tokens=self.config.learner.logprob_chunk_tokens,
            layout=self._layout,
        )

    def _make_starting_model(self, folder: Path, compute: Compute) -> Policy | None:
        if not needs_starting_model(self.config.algorithm):
            return None
        starting_model = self._make_policy(folder, compute, None)
        starting_model.model.requires_grad_(False)
        return starting_model

    def _make_optimizer(self, module: torch.nn.Module | ValueFunction) -> Optimizer:
        settings = self.config.learner
        betas = (settings.beta1, settings.beta2)
        return Optimizer(module.named_parameters(), betas=betas, weight_decay=settings.weight_decay)

    @property
    def num_parameters(self) -> int:
        """Parameters of the policy."""
        return sum(parameter.numel() for parameter in self.policy.model.parameters())

    @property
    def num_trainable(self) -> int:
        """Parameters of the policy that are trained."""
        return self.optimizer.num_parameters

    def restore(self, folder: Path) -> BatchId | None:
        """Take weights, moments and counters from a checkpoint; returns the last batch that is in them.

        Raises:
            ConfigError: the checkpoint is of other settings.
        """
        return read_state(self, folder)

    def update(self, trajectories: Sequence[Trajectory], version: int) -> UpdateResult:
        """Learn from one batch.

        Args:
            trajectories: the batch; a group's members may stand anywhere. Unscorable and empty ones are left out of
                everything, baselines and denominators included.
            version: the learner's weight version that the staleness of tokens is counted from.
        """
        metrics: StepMetrics = {}
        moving = [self.value_optimizer] if self.value_optimizer else []
        if updates_per_batch(self.config.algorithm) > 1:  # a single update is made when all is known to be well
            moving.append(self.optimizer)
        for optimizer in moving:
            optimizer.remember()
        try:
            made = self._learn(trajectories, version, metrics)
        except NoUpdate as reason:
            self.optimizer.discard_gradients()
            for optimizer in moving:
                optimizer.undo()
            self._policy_learner.forget()
            log.warning("batch at version %d: no update: %s", version, reason)
            return UpdateResult(outcome=BatchOutcome.NO_UPDATE, metrics=metrics, reason=str(reason))
        self.completed_updates += made
        return UpdateResult(
            outcome=BatchOutcome.COMMITTED if made else BatchOutcome.VALUE_WARMUP,
            metrics=metrics,
        )

    def _learn(self, trajectories: Sequence[Trajectory], version: int, metrics: StepMetrics) -> int:
        """Returns the number of the policy's updates; 0 in a warm-up. Moves counters and memory only at its end."""
        stopwatch = Stopwatch()
        usable = [t for t in trajectories if t.num_sampled and t.reward is not None and math.isfinite(t.reward)]
        metrics["batch/unscorable"] = float(len(trajectories) - len(usable))
        if not usable:
            raise NoUpdate("no trajectory has a reward and a sampled token")
        selection = self._select(self._with_penalties(usable, metrics), metrics)
        made = self._learn_from(selection.trained, version, stopwatch, metrics) if selection.trained else 0
        if self.value and selection.trained:
            self.value_batches += 1
        if self.memory:
            self.memory.learn(selection.visits)
        return made

    def _learn_from(
        self, trained: Sequence[Trajectory], version: int, stopwatch: Stopwatch, metrics: StepMetrics
    ) -> int:
        algorithm = self.config.algorithm
        batch = flatten(trained, read_final_state=self._bootstraps, device=self._device)
        micros = micro_batches(batch, budget=self.config.learner.micro_batch_tokens, layout=self._layout)
        metrics.update(describe_batch(batch, version), **{"batch/micro_batches": float(len(micros))})
        metrics["time/prepare_s"] = stopwatch.lap()

        scores = score_batch(algorithm, self.policy, self._starting_model, batch, micros)
        if algorithm.kl_coefficient and algorithm.kl_in == "reward":
            batch = with_divergence_in_rewards(batch, scores, algorithm.kl_coefficient, metrics)
        metrics["time/scores_s"] = stopwatch.lap()

        if self._value_learner:
            self._value_learner.learn(batch, micros, metrics)
            if self.value_batches < self.config.value.warmup_batches:
                metrics["time/value_s"] = stopwatch.lap()
                return 0
        evidence = Evidence(
            algorithm=algorithm,
            batch=batch,
            micros=micros,
            prompts=[t.prompt_id for t in trained],
            scores=scores,
            value=self._value_learner,
            memory=self.memory,
            gradient_norms=lambda: self._policy_learner.score_gradients(batch),
        )
        advantages = compute_advantages(evidence, metrics)
        metrics["time/value_s"] = stopwatch.lap()
        task = PolicyTask(
            batch=batch,
            micros=micros,
            advantages=advantages,
            scores=scores,
            order=sorted(range(len(trained)), key=lambda index: trained[index].sample_id),
            version=version,
        )
        made = self._policy_learner.update(task, self.completed_updates, metrics)
        metrics["time/policy_s"] = stopwatch.lap()
        return made

    # --- what of a batch is trained on ---

    def _with_penalties(self, usable: Sequence[Trajectory], metrics: StepMetrics) -> Sequence[Trajectory]:
        """DAPO's penalty on length, in the reward."""
        share = self.config.algorithm.overlong_share
        if not share:
            return usable
        rollout = self.config.rollout
        limit = min(rollout.max_new_tokens * self.config.environment.max_turns, rollout.max_tokens)
        lengths = torch.tensor([t.num_sampled for t in usable])
        penalties = overlong_penalty(lengths, max_length=limit, buffer=max(1, round(share * limit))).tolist()
        metrics["batch/overlong_penalty_mean"] = sum(penalties) / len(penalties)
        return [
            dataclasses.replace(t, reward=(t.reward or 0.0) + penalty) if penalty else t
            for t, penalty in zip(usable, penalties, strict=True)
        ]

    def _select(self, usable: Sequence[Trajectory], metrics: StepMetrics) -> Selection:
        """Leave out offline samples, and groups that teach nothing if the recipe drops those."""
        visits = [(t.prompt_id, t.reward or 0.0) for t in usable]
        trained = usable
        if self.memory:
            offline = self.memory.is_offline([t.prompt_id for t in usable])
            trained = [t for t, only_remembered in zip(usable, offline, strict=True) if not only_remembered]
            if self.config.algorithm.offline_samples:
                metrics["batch/offline_trajectories"] = float(len(usable) - len(trained))
        if self.config.algorithm.drop_uninformative:
            group_ids = torch.tensor([t.group_id for t in trained])
            rewards = rewards_tensor([t.reward for t in trained])
            informative = group_advantages(rewards, group_ids, scale="none").informative.tolist()
            metrics["batch/dropped_uninformative"] = float(len(trained) - sum(informative))
            trained = [t for t, teaches in zip(trained, informative, strict=True) if teaches]
            if not trained:
                raise NoUpdate("the rewards of no group differ")
        return Selection(trained=trained, visits=visits)


def with_divergence_in_rewards(
    batch: TokenBatch, scores: Scores, coefficient: float, metrics: StepMetrics
) -> TokenBatch:
    """Each token's reward less the coefficient times its log ratio to the starting model."""
    assert scores.logprobs is not None
    assert scores.ref_logprobs is not None
    everywhere = torch.ones_like(batch.seq_ids, dtype=torch.bool)
    rewards = kl_shaped_rewards(batch.token_rewards, scores.logprobs, scores.ref_logprobs, everywhere, coefficient)
    metrics["policy/kl_reference"] = float((batch.token_rewards - rewards).mean()) / coefficient
    return dataclasses.replace(batch, token_rewards=rewards, rewards=segment_sum(rewards, batch.seq_ids))
