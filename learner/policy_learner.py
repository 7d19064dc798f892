"""The policy's part of a step: the updates on one batch, and the loss of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.config import RunConfig
from learner.advantages import off_policy_lr_scale
from learner.baselines import sequence_log_weights
from learner.batching import Layout, MicroBatch, TokenBatch, build, plan
from learner.bounds import balanced_band, gradient_contributions
from learner.corrections import effective_sample_size, fresh_tokens, second_moment_mask
from learner.health import GradientTrail, Probe, describe_masked
from learner.importance import Band, log_ratio
from learner.micro_loss import MASKED, MEANS, MicroLoss, Minibatch, PolicyTask, Tally
from learner.objectives import token_weights
from learner.optimizer import NoUpdate, Optimizer
from learner.policy import Policy
from learner.schedule import learning_rate
from learner.segments import segment_mean
from learner.step_metrics import StepMetrics, describe_policy
from learner.token_loss import region_log_ratios


class PolicyLearner:
    """Cuts a batch into minibatches and makes an optimizer update on each, `epochs` times over.

    The cut follows sample ids and draws no random numbers. A minibatch in which no token is left in the loss is passed
    over; a batch in which that is so of all brings no update, and neither does one with a gradient that is not finite,
    whichever of its updates has it: the caller then undoes those before it.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, reference: Policy | None, optimizer: Optimizer, layout: Layout
    ) -> None:
        self._config = config
        self._algorithm = config.algorithm
        self._policy = policy
        self._optimizer = optimizer
        self._layout = layout
        self._trail = GradientTrail(optimizer)
        self._accumulate = MicroLoss(config, policy, reference)

    def update(self, task: PolicyTask, completed_updates: int, metrics: StepMetrics) -> int:
        """Returns how many optimizer updates were made, at least one.

        Raises:
            NoUpdate: see the class.
        """
        minibatches = self._minibatches(task)
        keep, seen = self._kept(task), torch.zeros_like(task.batch.rollout_logprobs)
        probe = Probe(self._algorithm, self._policy, task.batch, task.order, self._layout)
        made, tallies = 0, []
        for epoch in range(self._algorithm.epochs):
            for minibatch in minibatches:
                minibatch = self._with_searched_band(task, minibatch, is_first=not made)
                tally = Tally()
                for micro in minibatch.micros:
                    logprobs = self._accumulate(task, minibatch, micro, keep, tally)
                    if epoch == 0:
                        seen[micro.tokens] = logprobs
                tallies.append(tally)
                made += self._step(task, minibatch, seen, tally, completed_updates + made, metrics)
        metrics.update(summarise(tallies))
        metrics.update(describe_policy(seen, task.batch.rollout_logprobs, task.advantages))
        if not made:
            raise NoUpdate("every token is too stale or outside the trust region")
        metrics["policy/updates"] = float(made)
        self._trail.commit()
        metrics.update(probe.measure(seen if task.scores.logprobs is None else task.scores.logprobs))
        return made

    def forget(self) -> None:
        """The updates on the last batch have been undone."""
        self._trail.forget()

    def score_gradients(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """For each trajectory ([S] float64): squared norm of the gradient of its weighted log-probs, and log of the
        product of its ratios to the behaviour policy.

        Exact, so that each trajectory is a forward and a backward pass of its own: as dear as an update.
        """
        everything = range(batch.num_seqs)
        weights = self._weights(batch, torch.ones_like(batch.seq_ids, dtype=torch.bool), len(everything))
        logprobs = torch.zeros_like(batch.rollout_logprobs)
        squares = []
        for seq in everything:
            micro = build(batch, [seq], self._layout)
            own = self._policy.scores(micro, batch).logprobs
            logprobs[micro.tokens] = own.detach()
            score = (own * weights[micro.tokens]).sum()
            gradients = torch.autograd.grad(score, self._optimizer.parameters(), allow_unused=True)
            squares.append(sum(g.square().sum(dtype=torch.float64) for g in gradients if g is not None))
        norms = torch.stack([torch.as_tensor(square) for square in squares])
        return norms, sequence_log_weights(logprobs, batch.rollout_logprobs, batch.seq_ids)

    # --- the cut ---

    def _minibatches(self, task: PolicyTask) -> list[Minibatch]:
        batch, count = task.batch, self._algorithm.minibatches
        if count == 1:
            return [self._minibatch(batch, task.micros, range(batch.num_seqs))]
        found = []
        for part in np.array_split(np.array(task.order), count):
            if len(part):
                budget = self._config.learner.micro_batch_tokens
                plans = plan(batch.input_lengths[part], budget=budget, layout=self._layout)
                micros = [build(batch, part[rows].tolist(), self._layout) for rows in plans]
                found.append(self._minibatch(batch, micros, part.tolist()))
        return found

    def _minibatch(self, batch: TokenBatch, micros: Sequence[MicroBatch], seqs: Sequence[int]) -> Minibatch:
        chosen = torch.zeros_like(batch.rewards, dtype=torch.bool)
        chosen[list(seqs)] = True
        nll_weights = None
        if self._algorithm.nll_coefficient:
            correct = (chosen & (batch.rewards > self._algorithm.nll_above))[batch.seq_ids]
            tokens = float(correct.sum())
            nll_weights = token_weights(correct, batch.seq_ids, "token_mean", num_tokens=tokens, num_seqs=len(seqs))
        weights = self._weights(batch, chosen[batch.seq_ids], len(seqs))
        return Minibatch(micros=micros, seqs=seqs, weights=weights, nll_weights=nll_weights)

    def _weights(self, batch: TokenBatch, trained: Tensor, num_seqs: int) -> Tensor:
        rollout, turns = self._config.rollout, self._config.environment.max_turns
        return token_weights(
            trained,
            batch.seq_ids,
            self._algorithm.aggregation,
            num_tokens=float(trained.sum()),
            num_seqs=num_seqs,
            max_length=min(rollout.max_new_tokens * turns, rollout.max_tokens),
        )

    def _kept(self, task: PolicyTask) -> Tensor:
        """[N] bool, fixed for all updates on a batch: not too stale, and kept by M2PO."""
        algorithm, batch, staleness = self._algorithm, task.batch, self._config.staleness
        keep = torch.ones_like(batch.weight_versions, dtype=torch.bool)
        if staleness.on_exceeded == "mask":  # otherwise the buffer sees to it
            keep = fresh_tokens(batch.weight_versions, task.version, staleness.bound)
        if algorithm.reject_stale_sequences or algorithm.loss == "optimal_value":
            stale = segment_mean((~keep).float(), batch.seq_ids, torch.ones_like(keep))
            keep = (stale == 0)[batch.seq_ids]
        if algorithm.second_moment is not None:
            assert task.scores.logprobs is not None
            log_ratios = log_ratio(task.scores.logprobs, batch.rollout_logprobs)
            keep = keep & second_moment_mask(log_ratios, torch.ones_like(keep), algorithm.second_moment)
        return keep

    @torch.no_grad()
    def _with_searched_band(self, task: PolicyTask, minibatch: Minibatch, *, is_first: bool) -> Minibatch:
        """BAPO: bounds that balance the gradients of this update. It costs a pass, unless all ratios are 1."""
        algorithm, batch = self._algorithm, task.batch
        if algorithm.bounds != "balanced":
            return minibatch
        log_ratios = torch.zeros_like(batch.rollout_logprobs)
        if not (is_first and algorithm.reference == "proximal"):
            for micro in minibatch.micros:
                logprobs = self._policy.scores(micro, batch).logprobs
                log_ratios[micro.tokens] = region_log_ratios(algorithm, self._accumulate.tokens(task, micro, logprobs))

        def candidates(start: float, stop: float) -> list[float]:
            return [float(bound) for bound in np.linspace(start, stop, algorithm.balance_steps + 1)]

        lows = candidates(1 - algorithm.eps_low, 1 - algorithm.balance_eps_low)
        highs = candidates(1 + algorithm.eps_high, 1 + algorithm.balance_eps_high)
        gains = gradient_contributions(log_ratios, task.advantages, minibatch.weights > 0, lows, highs)
        low, high = balanced_band(*gains, lows, highs, algorithm.balance_target)
        return Minibatch(
            micros=minibatch.micros,
            seqs=minibatch.seqs,
            weights=minibatch.weights,
            nll_weights=minibatch.nll_weights,
            band=Band.from_ratios(low, high),
        )

    # --- one update ---

    def _step(
        self,
        task: PolicyTask,
        minibatch: Minibatch,
        seen: Tensor,
        tally: Tally,
        completed_updates: int,
        metrics: StepMetrics,
    ) -> int:
        """Check the gradient and move; returns the number of updates, 0 or 1."""
        norm = self._optimizer.gradient_norm()
        rate = self._learning_rate(completed_updates) * self._rate_scale(task, minibatch, seen, metrics)
        metrics.update({"policy/grad_norm": norm, "policy/learning_rate": rate})
        if not tally.usable():
            self._optimizer.discard_gradients()
            return 0
        if not math.isfinite(norm):
            metrics.update(summarise([tally]))
            raise NoUpdate(f"the policy's gradient norm is {norm}")
        metrics.update(self._trail.follow())
        self._optimizer.step(learning_rate=rate, norm=norm, max_norm=self._config.learner.max_grad_norm)
        return 1

    def _learning_rate(self, completed_updates: int) -> float:
        settings = self._config.learner
        return learning_rate(
            completed_updates,
            peak=settings.learning_rate,
            schedule=settings.schedule,
            warmup_updates=settings.warmup_updates,
            total_updates=self._config.max_updates,
        )

    def _rate_scale(self, task: PolicyTask, minibatch: Minibatch, seen: Tensor, metrics: StepMetrics) -> float:
        """VCPO's factor on the step size, by the effective number of the minibatch's trajectories."""
        batch = task.batch
        weights = sequence_log_weights(seen, batch.rollout_logprobs, batch.seq_ids)[list(minibatch.seqs)]
        # The size is the same for weights on any scale, and exp of the largest would overflow.
        effective = effective_sample_size((weights - weights.max()).exp().nan_to_num(nan=0.0))
        metrics["policy/effective_samples_share"] = float(effective) / len(minibatch.seqs)
        if self._algorithm.learning_rate_scale == "none":
            return 1.0
        return float(off_policy_lr_scale(effective, len(minibatch.seqs)))


def summarise(tallies: Sequence[Tally]) -> StepMetrics:
    """Counts summed over the updates of a batch, losses and per-token numbers averaged."""
    totals: dict[str, Tensor] = {}
    for tally in tallies:
        for name, value in tally.sums.items():
            totals[name] = totals[name] + value if name in totals else value
    metrics = describe_masked(totals.pop(MASKED)) if MASKED in totals else {}
    numbers = {name: float(value) for name, value in totals.items()}
    for name in MEANS:
        if f"{name}/sum" in numbers:
            metrics[MEANS[name]] = numbers.pop(f"{name}/sum") / max(1.0, numbers.pop(f"{name}/tokens"))
    numbers["policy/loss"] /= len(tallies)
    return {**metrics, **numbers}
