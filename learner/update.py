"""One learner step: from a batch of trajectories to new weights, or to nothing at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from common.config import AlgorithmConfig, RunConfig
from common.types import BatchId, BatchOutcome, Trajectory
from learner.advantages import explained_variance, group_advantages, moments, whiten
from learner.batching import Layout, MicroBatch, TokenBatch, flatten, micro_batches
from learner.corrections import fresh_tokens
from learner.importance import Band, Surrogate, clip, double_sided_mask, log_ratio, ratio
from learner.objectives import entropy_loss, policy_loss, token_weights, value_loss
from learner.optimizer import Optimizer
from learner.policy import Policy
from learner.returns import advantages_and_returns, length_adaptive_lambda
from learner.schedule import learning_rate
from learner.segments import segment_count
from learner.state import read_state
from learner.step_metrics import StepMetrics, Stopwatch, describe_batch, describe_policy
from learner.trunk import Compute
from learner.value import PolicyHead, ValueFunction, ValueModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """What became of a batch."""

    outcome: BatchOutcome
    metrics: dict[str, float] = field(default_factory=dict)  # names of common/run_metrics.py
    reason: str = ""  # why there was no update


class NoUpdate(Exception):
    """The batch cannot be learned from; everything must be as it was before it."""


class Learner:
    """Policy, value function and optimizers, and the step that moves them.

    A step ends in one of three ways. Committed: the policy moved by one optimizer step. Value warm-up: only the value
    function moved. No update: a gradient is not finite, or no token is left in the policy loss; then nothing has moved,
    neither weights nor moments nor the schedule, bit for bit.

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
        self._device = choose_device(config)
        self._layout = choose_layout(config, self._device)
        compute = choose_compute(config, self._device, self._layout)
        self.policy = Policy(
            model_folder,
            compute,
            trainable_layers=config.learner.trainable_layers,
            logprob_chunk_tokens=config.learner.logprob_chunk_tokens,
            layout=self._layout,
        )
        self.optimizer = self._make_optimizer(self.policy.model)
        self.value = self._make_value_function(model_folder, compute)
        self.value_optimizer = self._make_optimizer(self.value) if self.value else None
        algorithm = config.algorithm
        self._bootstraps = algorithm.advantage == "gae" and algorithm.length_stop == "bootstrap"

    def _make_optimizer(self, module: torch.nn.Module | ValueFunction) -> Optimizer:
        settings = self.config.learner
        betas = (settings.beta1, settings.beta2)
        return Optimizer(module.named_parameters(), betas=betas, weight_decay=settings.weight_decay)

    def _make_value_function(self, folder: Path, compute: Compute) -> ValueFunction | None:
        kind = self.config.algorithm.value
        if kind == "own_model":
            return ValueModel(folder, compute, freeze_attention=self.config.value.freeze_attention)
        if kind == "policy_head":
            width = self.policy.model.get_input_embeddings().weight.shape[1]
            return PolicyHead(self.policy.trunk, width, seed=self.config.seed)
        return None

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
        if self.value_optimizer:
            self.value_optimizer.remember()
        try:
            outcome = self._learn(trajectories, version, metrics)
        except NoUpdate as reason:
            self.optimizer.discard_gradients()
            if self.value_optimizer:
                self.value_optimizer.undo()
            log.warning("batch at version %d: no update: %s", version, reason)
            return UpdateResult(outcome=BatchOutcome.NO_UPDATE, metrics=metrics, reason=str(reason))
        if self.value:
            self.value_batches += 1
        if outcome is BatchOutcome.COMMITTED:
            self.completed_updates += 1
        return UpdateResult(outcome=outcome, metrics=metrics)

    def _learn(self, trajectories: Sequence[Trajectory], version: int, metrics: StepMetrics) -> BatchOutcome:
        stopwatch = Stopwatch()
        usable = [t for t in trajectories if t.num_sampled and t.reward is not None and math.isfinite(t.reward)]
        metrics["batch/unscorable"] = float(len(trajectories) - len(usable))
        if not usable:
            raise NoUpdate("no trajectory has a reward and a sampled token")
        batch = flatten(usable, read_final_state=self._bootstraps, device=self._device)
        micros = micro_batches(batch, budget=self.config.learner.micro_batch_tokens, layout=self._layout)
        metrics.update(describe_batch(batch, version), **{"batch/micro_batches": float(len(micros))})
        metrics["time/prepare_s"] = stopwatch.lap()

        if self.value:
            warming_up = self.value_batches < self.config.value.warmup_batches
            self._update_value_function(self.value, batch, micros, metrics)
            if not warming_up:
                advantages = self._learned_advantages(self.value, batch, micros)
            metrics["time/value_s"] = stopwatch.lap()
            if warming_up:
                return BatchOutcome.VALUE_WARMUP
        else:
            advantages = self._group_advantages(batch, metrics)
        self._update_policy(batch, micros, advantages, version, metrics)
        metrics["time/policy_s"] = stopwatch.lap()
        return BatchOutcome.COMMITTED

    # --- value function ---

    def _update_value_function(
        self, value: ValueFunction, batch: TokenBatch, micros: Sequence[MicroBatch], metrics: StepMetrics
    ) -> None:
        """K updates on the same targets: mean squared error over all sampled tokens of the batch."""
        assert self.value_optimizer is not None
        value.start(micros)
        targets = self._value_targets(value, batch, micros)
        weights = self._weights(batch, "token_mean")
        for repeat in range(self.config.value.updates_per_batch):
            total = 0.0
            seen = torch.zeros_like(targets)
            for index, micro in enumerate(micros):
                values = value.values(index).before
                loss, _ = value_loss(values, targets[micro.tokens], weights[micro.tokens])
                loss.backward()
                total += float(loss.detach())
                seen[micro.tokens] = values.detach()
            if repeat == 0:
                everywhere = torch.ones_like(targets, dtype=torch.bool)
                explained = explained_variance(moments(targets - seen, everywhere), moments(targets, everywhere))
                metrics["value/mean"] = float(seen.mean())
                metrics["value/return_mean"] = float(targets.mean())
                if torch.isfinite(explained):
                    metrics["value/explained_variance"] = float(explained)
            norm = self.value_optimizer.gradient_norm()
            metrics["value/loss"], metrics["value/grad_norm"] = total, norm
            if not math.isfinite(norm):
                raise NoUpdate(f"the value function's gradient norm is {norm}")
            self.value_optimizer.step(
                learning_rate=self.config.value.learning_rate, norm=norm, max_norm=self.config.learner.max_grad_norm
            )

    def _value_targets(self, value: ValueFunction, batch: TokenBatch, micros: Sequence[MicroBatch]) -> Tensor:
        """[N] float32, fixed for all updates on this batch. A plain return needs no values, which saves a pass."""
        algorithm = self.config.algorithm
        if algorithm.value_lambda < 1.0 or self._bootstraps:
            values, bootstrap = self._values(value, batch, micros)
        else:
            values, bootstrap = torch.zeros_like(batch.rollout_logprobs), None
        _, targets = self._estimate(batch, values, bootstrap)
        return targets

    @torch.no_grad()
    def _values(
        self, value: ValueFunction, batch: TokenBatch, micros: Sequence[MicroBatch]
    ) -> tuple[Tensor, Tensor | None]:
        """Values before each sampled token [N]; and, to bootstrap from, after the last one of cut trajectories [S]."""
        before = torch.zeros_like(batch.rollout_logprobs)
        final = torch.zeros_like(batch.rewards) if self._bootstraps else None
        for index, micro in enumerate(micros):
            values = value.values(index)
            before[micro.tokens] = values.before
            if final is not None:
                final[micro.seqs] = torch.where(batch.truncated[micro.seqs], values.final.double(), 0.0)
        return before, final

    def _estimate(self, batch: TokenBatch, values: Tensor, bootstrap: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advantages and value targets, [N] each."""
        algorithm = self.config.algorithm
        everywhere = torch.ones_like(values, dtype=torch.bool)
        lam_policy: Tensor | float
        if algorithm.policy_lambda == "length_adaptive":
            lam_policy = length_adaptive_lambda(segment_count(batch.seq_ids, everywhere), algorithm.lambda_alpha)
        else:
            lam_policy = algorithm.policy_lambda
        return advantages_and_returns(
            values,
            batch.token_rewards,
            batch.seq_ids,
            everywhere,
            gamma=algorithm.gamma,
            lam_policy=lam_policy,
            lam_value=algorithm.value_lambda,
            bootstrap=bootstrap,
        )

    # --- advantages ---

    def _learned_advantages(self, value: ValueFunction, batch: TokenBatch, micros: Sequence[MicroBatch]) -> Tensor:
        values, bootstrap = self._values(value, batch, micros)
        advantages, _ = self._estimate(batch, values, bootstrap)
        return self._whitened(advantages)

    def _group_advantages(self, batch: TokenBatch, metrics: StepMetrics) -> Tensor:
        """[N] float32, the same for all tokens of a trajectory."""
        kind = self.config.algorithm.advantage
        result = group_advantages(
            batch.rewards,
            batch.group_ids,
            scale="std" if kind == "group_mean_std" else "none",
            leave_one_out=kind == "leave_one_out",
        )
        groups = len(set(batch.group_ids.tolist()))
        metrics["batch/groups"] = float(groups)
        metrics["batch/uninformative_groups"] = float(groups - len(set(batch.group_ids[result.informative].tolist())))
        return self._whitened(result.advantages[batch.seq_ids].float())

    def _whitened(self, advantages: Tensor) -> Tensor:
        if not self.config.algorithm.whiten_advantages:
            return advantages
        return whiten(advantages, torch.ones_like(advantages, dtype=torch.bool), bessel=False)

    # --- policy ---

    def _update_policy(
        self,
        batch: TokenBatch,
        micros: Sequence[MicroBatch],
        advantages: Tensor,
        version: int,
        metrics: StepMetrics,
    ) -> None:
        algorithm, settings = self.config.algorithm, self.config.learner
        weights = self._weights(batch, algorithm.aggregation)
        fresh = self._fresh(batch, version)
        logprobs = torch.zeros_like(batch.rollout_logprobs)
        sums: dict[str, Tensor] = {}
        for micro in micros:
            tokens = micro.tokens
            scores = self.policy.scores(micro, batch, with_entropies=algorithm.entropy_coefficient > 0)
            surrogate = choose_surrogate(algorithm, scores.logprobs, batch.rollout_logprobs[tokens], advantages[tokens])
            loss, parts = policy_loss(surrogate, advantages[tokens], weights[tokens], keep=fresh[tokens])
            if scores.entropies is not None:
                bonus, entropy_parts = entropy_loss(scores.entropies, weights[tokens])
                loss = loss + algorithm.entropy_coefficient * bonus
                parts = {**parts, **entropy_parts}
            loss.backward()
            add_up(sums, {**parts, "policy/loss": loss.detach().double()})
            logprobs[tokens] = scores.logprobs.detach()

        norm = self.optimizer.gradient_norm()
        rate = learning_rate(
            self.completed_updates,
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup_updates=settings.warmup_updates,
            total_updates=self.config.max_updates,
        )
        totals = {name: float(value) for name, value in sums.items()}
        if "entropy/sum" in totals:
            metrics["policy/entropy"] = totals.pop("entropy/sum") / max(1.0, totals.pop("entropy/tokens"))
        metrics.update(totals, **{"policy/grad_norm": norm, "policy/learning_rate": rate})
        metrics.update(describe_policy(logprobs, batch.rollout_logprobs, advantages))
        left = totals["policy/tokens"] - totals["policy/rejected_tokens"] - totals["policy/masked_tokens"]
        if not left:
            raise NoUpdate("every token is too stale or outside the trust region")
        if not math.isfinite(norm):
            raise NoUpdate(f"the policy's gradient norm is {norm}")
        self.optimizer.step(learning_rate=rate, norm=norm, max_norm=settings.max_grad_norm)

    def _fresh(self, batch: TokenBatch, version: int) -> Tensor:
        """[N] bool; False rejects a token from the numerator of the policy loss."""
        staleness = self.config.staleness
        if staleness.on_exceeded != "mask":  # the buffer sees to it
            return torch.ones_like(batch.weight_versions, dtype=torch.bool)
        return fresh_tokens(batch.weight_versions, version, staleness.bound)

    def _weights(self, batch: TokenBatch, aggregation: str) -> Tensor:
        rollout, turns = self.config.rollout, self.config.environment.max_turns
        return token_weights(
            torch.ones_like(batch.seq_ids, dtype=torch.bool),
            batch.seq_ids,
            aggregation,  # type: ignore[arg-type]
            num_tokens=batch.num_tokens,
            num_seqs=batch.num_seqs,
            max_length=min(rollout.max_new_tokens * turns, rollout.max_tokens),
        )


def choose_surrogate(
    algorithm: AlgorithmConfig, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor
) -> Surrogate:
    """The trust region of the configuration; all [n].

    A batch is one optimizer step, so that the policy before the update *is* the current one, and a proximal reference
    costs no pass of its own: its ratio is 1 and only carries the gradient.
    """
    reference = rollout_logprobs if algorithm.reference == "behaviour" else logprobs.detach()
    log_ratios = log_ratio(logprobs, reference)
    band = Band.from_offsets(algorithm.eps_low, algorithm.eps_high)
    if algorithm.trust_region == "mask":
        return double_sided_mask(log_ratios, logprobs, band)
    if algorithm.trust_region == "clip":
        return clip(log_ratios, advantages, band)
    return ratio(log_ratios)


def add_up(sums: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    for name, value in parts.items():
        sums[name] = sums[name] + value if name in sums else value


def choose_device(config: RunConfig) -> torch.device:
    wanted = config.learner.device
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def choose_layout(config: RunConfig, device: torch.device) -> Layout:
    """Packing pays where attention takes sequences of any length; through a dense mask it costs more than padding."""
    if config.learner.layout == "auto":
        return "packed" if _has_flash_attention(config, device) else "rows"
    return config.learner.layout


def choose_compute(config: RunConfig, device: torch.device, layout: Layout) -> Compute:
    """bfloat16 on GPUs if that is what engines serve; on CPUs it is slower than float32."""
    dtype = torch.bfloat16 if device.type == "cuda" and config.model.dtype == "bfloat16" else torch.float32
    if layout == "rows" or device.type == "cpu":
        return Compute(device, dtype)
    return Compute(device, dtype, "flash_attention_2" if _has_flash_attention(config, device) else "flex_attention")


def _has_flash_attention(config: RunConfig, device: torch.device) -> bool:
    """It knows no float32."""
    return device.type == "cuda" and config.model.dtype == "bfloat16" and bool(is_flash_attn_2_available())
