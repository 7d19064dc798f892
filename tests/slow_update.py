"""A whole learner step written again, slowly and in float64, from the formulas: one trajectory and one token at a time.

It shares no code with `learner/`: full logits, Python loops, AdamW by hand. Knows what the recipes use.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import RunConfig
from common.types import FinishReason, Trajectory
from tests.slow_loss import Sample, mean, minibatch_loss

Named = dict[str, Tensor]


@dataclass
class SlowAdamW:
    """State of one optimizer."""

    parameters: Named
    betas: tuple[float, float]
    weight_decay: float
    max_norm: float
    steps: int = 0
    first: Named = field(default_factory=dict)
    second: Named = field(default_factory=dict)

    def step(self, loss: Tensor, rate: float) -> float:
        """One update; returns the gradient's norm before clipping."""
        gradients = dict(
            zip(
                self.parameters,
                torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True),
                strict=True,
            )
        )
        gradients = {name: torch.zeros_like(self.parameters[name]) if g is None else g for name, g in gradients.items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        scale = min(1.0, self.max_norm / norm) if norm else 1.0
        self.steps += 1
        beta1, beta2 = self.betas
        for name, parameter in self.parameters.items():
            g = gradients[name] * scale
            self.first[name] = beta1 * self.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
            self.second[name] = beta2 * self.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g * g
            m = self.first[name] / (1 - beta1**self.steps)
            v = self.second[name] / (1 - beta2**self.steps)
            with torch.no_grad():
                parameter.mul_(1 - rate * self.weight_decay)
                parameter.sub_(rate * m / (v.sqrt() + 1e-8))
        return norm


class SlowLearner:
    """Built from copies of a learner's models before its first step."""

    def __init__(self, config: RunConfig, learner: Any) -> None:
        self.config = config
        self.model = copy.deepcopy(learner.policy.model).double()
        self.start = copy.deepcopy(self.model)
        self.policy_adam = self._adam({n: p for n, p in self.model.named_parameters() if p.requires_grad})
        self.trunk: Any = None
        self.head: Callable[[Tensor], Tensor]
        self.past: dict[str, list[float]] = {}  # rewards of each prompt
        self.offline: dict[str, list[float]] = {}
        self.rates: dict[str, tuple[float, float]] = {}
        self.visits: dict[str, int] = {}
        if config.algorithm.value == "own_model":
            self.trunk = copy.deepcopy(learner.value._trunk.module).double()
            head = copy.deepcopy(learner.value._head).double()
            trained = ("mlp", "norm") if config.value.freeze_attention else ("",)
            named = {f"trunk.{n}": p for n, p in self.trunk.named_parameters() if any(word in n for word in trained)}
            named |= {f"head.{name}": p for name, p in head.named_parameters()}
            self.head = head
            self.value_adam = self._adam(named)
        elif config.algorithm.value == "policy_head":
            head = copy.deepcopy(learner.value._head).double()
            self.head = head
            self.value_adam = self._adam(dict(head.named_parameters()))

    def _adam(self, parameters: Named) -> SlowAdamW:
        settings = self.config.learner
        return SlowAdamW(parameters, (settings.beta1, settings.beta2), settings.weight_decay, settings.max_grad_norm)

    # --- one trajectory at a time ---

    def rows(self, model: Any, t: Trajectory) -> list[Tensor]:
        """Log-probs of the whole vocabulary before each sampled token, at the trajectory's temperature."""
        ids = torch.tensor(t.token_ids.astype("int64"))
        logits = model(input_ids=ids[None]).logits[0].double() / t.temperature
        out = []
        for place in range(len(ids)):
            if t.loss_mask[place]:
                row = logits[place - 1]
                out.append(row - torch.log(torch.exp(row - row.max()).sum()) - row.max())
        return out

    def logprobs(self, t: Trajectory, model: Any = None) -> list[Tensor]:
        """Of the sampled tokens."""
        sampled = [int(token) for token, mask in zip(t.token_ids, t.loss_mask, strict=True) if mask]
        return [row[token] for row, token in zip(self.rows(model or self.model, t), sampled, strict=True)]

    def numbers(self, t: Trajectory, model: Any = None) -> list[float]:
        return [float(x.detach()) for x in self.logprobs(t, model)]

    def exact_kl(self, t: Trajectory) -> list[float]:
        pairs = zip(self.rows(self.model, t), self.rows(self.start, t), strict=True)
        return [float((own.exp() * (own - ref)).sum().detach()) for own, ref in pairs]

    def values(self, t: Trajectory) -> tuple[list[Tensor], Tensor]:
        """Before each sampled token; and after the last one."""
        ids = torch.tensor(t.token_ids.astype("int64"))[None]
        if self.trunk is not None:
            hidden = self.trunk(input_ids=ids).last_hidden_state[0]
        else:
            hidden = self.model.model(input_ids=ids).last_hidden_state[0].detach()
        values = self.head(hidden)[:, 0]
        places = [place for place in range(ids.shape[1]) if t.loss_mask[place]]
        return [values[place - 1] for place in places], values[places[-1]]

    def turns(self, t: Trajectory) -> list[int]:
        """Number of the turn of each sampled token."""
        lengths = [turn.stop - turn.start for turn in t.turns]
        return [number for number, length in enumerate(lengths) for _ in range(length)]

    def by_state(self, t: Trajectory, per_token: Sequence[Any], *, total: bool) -> list[Any]:
        """Tokens as they are, or one entry a turn: the sum, the mean or the last."""
        if self.config.value.granularity == "token":
            return list(per_token)
        grouped: dict[int, list[Any]] = {}
        for turn, entry in zip(self.turns(t), per_token, strict=True):
            grouped.setdefault(turn, []).append(entry)
        if total:
            return [sum(entries) for entries in grouped.values()]
        if self.config.value.granularity == "turn_last":
            return [entries[-1] for entries in grouped.values()]
        return [sum(entries) / len(entries) for entries in grouped.values()]

    def to_tokens(self, t: Trajectory, per_state: Sequence[Any]) -> list[Any]:
        if self.config.value.granularity == "token":
            return list(per_state)
        numbers = self.turns(t)
        order = list(dict.fromkeys(numbers))
        return [per_state[order.index(number)] for number in numbers]

    def token_rewards(self, t: Trajectory) -> list[float]:
        """Of the sampled tokens."""
        rewards = [0.0] * len(t.token_ids)
        for turn in t.turns:
            rewards[turn.stop - 1] += turn.reward
        assert t.reward is not None
        rewards[t.turns[-1].stop - 1] += t.reward - sum(turn.reward for turn in t.turns)
        sampled = [reward for reward, mask in zip(rewards, t.loss_mask, strict=True) if mask]
        algorithm = self.config.algorithm
        if algorithm.kl_coefficient and algorithm.kl_in == "reward":
            drift = zip(self.numbers(t), self.numbers(t, self.start), strict=True)
            sampled = [r - algorithm.kl_coefficient * (lp - ref) for r, (lp, ref) in zip(sampled, drift, strict=True)]
        return sampled

    def gae(self, t: Trajectory, lam: float | str) -> tuple[list[float], list[float]]:
        """Advantages, and advantages + values."""
        algorithm = self.config.algorithm
        per_token, final = self.values(t)
        values = [float(v) for v in self.by_state(t, [v.detach() for v in per_token], total=False)]
        rewards = self.by_state(t, self.token_rewards(t), total=True)
        if lam == "length_adaptive":
            lam = max(0.0, 1 - 1 / (algorithm.lambda_alpha * len(values)))
        cut = algorithm.length_stop == "bootstrap" and t.finish_reason is FinishReason.LENGTH
        advantages = self.recursion(values, rewards, float(lam), float(final) if cut else 0.0)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        return self.to_tokens(t, advantages), self.to_tokens(t, returns)

    def recursion(self, values: list[float], rewards: list[float], lam: float, following: float) -> list[float]:
        gamma, advantage = self.config.algorithm.gamma, 0.0
        advantages = []
        for value, reward in zip(reversed(values), reversed(rewards), strict=True):
            advantage = reward + gamma * following - value + gamma * lam * advantage
            following = value
            advantages.insert(0, advantage)
        return advantages

    # --- the step ---

    def update(self, batch: Sequence[Trajectory], version: int, rate: float) -> dict[str, float]:
        """One batch, at the constant step size `rate`; what it must have been by the names of the learner's metrics."""
        metrics: dict[str, float] = {}
        batch = self._selected(self._with_penalty(batch))
        algorithm = self.config.algorithm
        if not batch:
            return metrics
        old = [self.numbers(t) for t in batch]
        if algorithm.value != "none":
            self._update_values(batch, metrics)
        advantages = self._whitened(self._advantages(batch))
        fixed = self._fixed(batch, old, version)
        centred = self._group(batch, "group_mean")
        order = sorted(range(len(batch)), key=lambda index: batch[index].sample_id)
        parts = [part.tolist() for part in np.array_split(np.array(order), algorithm.minibatches) if len(part)]
        totals = {"policy/loss": 0.0, "policy/masked_tokens": 0, "policy/rejected_tokens": 0, "policy/updates": 0}
        for part in parts * algorithm.epochs:
            samples = [
                Sample(
                    logprobs=self.logprobs(batch[i]),
                    behaviour=[float(x) for x in batch[i].rollout_logprobs[batch[i].loss_mask]],
                    old=old[i],
                    advantages=advantages[i],
                    staleness=[version - int(v) for v in batch[i].weight_versions[batch[i].loss_mask]],
                    reward=self.reward(batch[i]),
                    ref=self.numbers(batch[i], self.start),
                    kl=self.exact_kl(batch[i]) if algorithm.loss == "implicit_value" else [],
                    fixed=fixed[i],
                )
                for i in part
            ]
            rollout, turns = self.config.rollout, self.config.environment.max_turns
            limit = min(rollout.max_new_tokens * turns, rollout.max_tokens)
            eta = self.config.staleness.bound
            result = minibatch_loss(algorithm, samples, eta=eta, limit=limit, centred=[centred[i] for i in part])
            totals["policy/loss"] += float(result.loss.detach()) / (len(parts) * algorithm.epochs)
            totals["policy/masked_tokens"] += result.masked
            totals["policy/rejected_tokens"] += result.rejected
            if result.tokens > result.masked + result.rejected:
                factor = self._effective_samples(samples)
                metrics["policy/grad_norm"] = self.policy_adam.step(result.loss, rate * factor)
                totals["policy/updates"] += 1
            else:
                metrics["policy/grad_norm"] = 0.0
        self._remember(batch)
        return {**metrics, **totals}

    def _with_penalty(self, batch: Sequence[Trajectory]) -> list[Trajectory]:
        algorithm, rollout = self.config.algorithm, self.config.rollout
        if not algorithm.overlong_share:
            return list(batch)
        limit = min(rollout.max_new_tokens * self.config.environment.max_turns, rollout.max_tokens)
        buffer = max(1, round(algorithm.overlong_share * limit))
        out = []
        for t in batch:
            over = min(1.0, max(0.0, (t.num_sampled - (limit - buffer)) / buffer))
            out.append(dataclasses.replace(t, reward=(t.reward or 0.0) - over))
        return out

    def _selected(self, batch: list[Trajectory]) -> list[Trajectory]:
        algorithm = self.config.algorithm
        wanted = algorithm.offline_samples
        if wanted:
            kept = [t for t in batch if len(self.offline.get(t.prompt_id, [])) >= wanted]
            for t in batch:
                if t not in kept:
                    self.offline.setdefault(t.prompt_id, []).append(float(t.reward or 0.0))
            batch = kept
        if algorithm.drop_uninformative:
            batch = [t for t in batch if len({o.reward for o in batch if o.group_id == t.group_id}) > 1]
        return batch

    def _fixed(self, batch: Sequence[Trajectory], old: list[list[float]], version: int) -> list[list[bool]]:
        """Tokens that no rule for the whole batch rejects."""
        algorithm, bound = self.config.algorithm, self.config.staleness.bound
        keep = [[version - int(v) <= bound for v in t.weight_versions[t.loss_mask]] for t in batch]
        if algorithm.reject_stale_sequences or algorithm.loss == "optimal_value":
            keep = [[all(tokens)] * len(tokens) for tokens in keep]
        if algorithm.second_moment is not None:
            squares = [
                ((own - float(beh)) ** 2, i, k)
                for i, t in enumerate(batch)
                for k, (own, beh) in enumerate(zip(old[i], t.rollout_logprobs[t.loss_mask], strict=True))
            ]
            squares.sort()
            while len(squares) > 1 and mean([entry[0] for entry in squares]) >= algorithm.second_moment:
                _, i, k = squares.pop()
                keep[i][k] = False
        return keep

    def _effective_samples(self, samples: Sequence[Sample]) -> float:
        if self.config.algorithm.learning_rate_scale == "none":
            return 1.0
        weights = []
        for sample in samples:
            pairs = zip(sample.logprobs, sample.behaviour, strict=True)
            weights.append(math.exp(sum(float(lp.detach()) - beh for lp, beh in pairs)))
        return math.sqrt(sum(weights) ** 2 / sum(w * w for w in weights) / len(weights))

    def _update_values(self, batch: Sequence[Trajectory], metrics: dict[str, float]) -> None:
        settings = self.config.value
        targets = [self.gae(t, self.config.algorithm.value_lambda)[1] for t in batch]
        before = [[float(v.detach()) for v in self.values(t)[0]] for t in batch]
        last_only = settings.granularity == "turn_last"
        total = sum(len(set(self.turns(t))) if last_only else t.num_sampled for t in batch)
        for _ in range(settings.updates_per_batch):
            loss = torch.zeros((), dtype=torch.float64)
            for t, returns, old in zip(batch, targets, before, strict=True):
                values = self.values(t)[0]
                if settings.granularity == "turn_mean":
                    values = self.to_tokens(t, self.by_state(t, values, total=False))
                numbers = self.turns(t)
                for k, (value, target) in enumerate(zip(values, returns, strict=True)):
                    if last_only and k + 1 < len(numbers) and numbers[k + 1] == numbers[k]:
                        continue
                    error = (value - target) ** 2
                    if settings.clip_range is not None:
                        near = torch.clamp(value, old[k] - settings.clip_range, old[k] + settings.clip_range)
                        error = torch.maximum(error, (near - target) ** 2)
                    loss = loss + error / total
            metrics["value/loss"] = float(loss.detach())
            metrics["value/grad_norm"] = self.value_adam.step(loss, settings.learning_rate)

    # --- advantages ---

    def _advantages(self, batch: Sequence[Trajectory]) -> list[list[float]]:
        algorithm, kind = self.config.algorithm, self.config.algorithm.advantage
        if kind == "gae":
            return [self.gae(t, algorithm.policy_lambda)[0] for t in batch]
        if kind == "return":
            return [self.recursion([0.0] * t.num_sampled, self.token_rewards(t), 1.0, 0.0) for t in batch]
        if kind == "implicit":
            return [self._implicit(t) for t in batch]
        if kind == "hybrid":
            return [self._hybrid(t, batch) for t in batch]
        if kind in ("running_mean", "success_rate", "optimal_value"):
            whole = mean([float(t.reward or 0.0) for t in batch])
            per_sequence = [float(t.reward or 0.0) - self._baseline(t.prompt_id, whole) for t in batch]
        elif kind == "smoothed":
            per_sequence = self._smoothed(batch)
        elif kind == "least_variance":
            per_sequence = self._least_variance(batch)
        else:
            per_sequence = self._group(batch, kind)
        return [[a] * t.num_sampled for t, a in zip(batch, per_sequence, strict=True)]

    def _group(self, batch: Sequence[Trajectory], kind: str) -> list[float]:
        out = []
        for t in batch:
            rewards = [self.reward(other) for other in batch if other.group_id == t.group_id]
            n, centred = len(rewards), self.reward(t) - mean(rewards)
            if n < 2:
                out.append(0.0)
            elif kind == "group_mean_std":
                deviation = math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (n - 1))
                out.append(centred / (deviation + 1e-6))
            else:
                out.append(centred * n / (n - 1) if kind == "leave_one_out" else centred)
        return out

    def reward(self, t: Trajectory) -> float:
        return sum(self.token_rewards(t))

    def _hybrid(self, t: Trajectory, batch: Sequence[Trajectory]) -> list[float]:
        values = [float(v.detach()) for v in self.values(t)[0]]
        rewards = [0.0] * (len(values) - 1)
        rewards.append(mean([self.reward(other) for other in batch if other.group_id == t.group_id]))
        return self.recursion(values, rewards, 0.0, 0.0)

    def _implicit(self, t: Trajectory) -> list[float]:
        algorithm = self.config.algorithm
        parts = zip(self.numbers(t), self.numbers(t, self.start), self.exact_kl(t), strict=True)
        rewards = [algorithm.implicit_beta * (lp - ref - kl) for lp, ref, kl in parts]
        assert algorithm.policy_lambda != "length_adaptive"
        return self.recursion([0.0] * len(rewards), rewards, algorithm.policy_lambda, 0.0)

    def _least_variance(self, batch: Sequence[Trajectory]) -> list[float]:
        out = []
        parameters = list(self.policy_adam.parameters.values())
        norms, weights = [], []
        for t in batch:
            score = sum(self.logprobs(t)) / t.num_sampled
            assert isinstance(score, Tensor)
            norms.append(sum(float(g.square().sum()) for g in torch.autograd.grad(score, parameters)))
            pairs = zip(self.numbers(t), t.rollout_logprobs[t.loss_mask], strict=True)
            weights.append(math.exp(sum(lp - float(beh) for lp, beh in pairs)))
        for t in batch:
            members = [i for i, other in enumerate(batch) if other.group_id == t.group_id]
            shares = {i: weights[i] ** 2 * norms[i] for i in members}
            baseline = sum(shares[i] * self.reward(batch[i]) for i in members) / sum(shares.values())
            out.append(self.reward(t) - baseline)
        return out

    def _smoothed(self, batch: Sequence[Trajectory]) -> list[float]:
        out = []
        for t, new in zip(batch, self._group(batch, "group_mean_std"), strict=True):
            rewards = self.past.get(t.prompt_id, []) + [self.reward(o) for o in batch if o.group_id == t.group_id]
            deviation = math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (len(rewards) - 1))
            total = (self.reward(t) - mean(rewards)) / (deviation + 1e-6)
            visit = self.visits.get(t.prompt_id, 0) + 1
            both = (((visit - 1) * new + total) / visit, (new + (visit - 1) * total) / visit)
            out.append(min(both, key=abs))
        return out

    def _baseline(self, prompt: str, unknown: float) -> float:
        algorithm = self.config.algorithm
        if algorithm.advantage == "running_mean":
            past = self.past.get(prompt, [])[-algorithm.history :]
            return mean(past) if past else unknown
        if algorithm.advantage == "success_rate":
            alpha, beta = self._rate(prompt)
            return alpha / (alpha + beta)
        beta = algorithm.optimal_value_beta
        return beta * math.log(mean([math.exp(r / beta) for r in self.offline[prompt]]))

    def _rate(self, prompt: str) -> tuple[float, float]:
        trials = self.offline.get(prompt, [])
        n, successes = len(trials), sum(trials)
        start = (8 * (successes + 0.5) / (n + 1), 8 * (n - successes + 0.5) / (n + 1))
        return self.rates.get(prompt, start)

    def _remember(self, batch: Sequence[Trajectory]) -> None:
        for t in batch:
            reward = float(t.reward or 0.0)
            alpha, beta = self._rate(t.prompt_id)
            keep = self.config.algorithm.retention
            self.rates[t.prompt_id] = (keep * alpha + reward, keep * beta + 1 - reward)
            self.past.setdefault(t.prompt_id, []).append(reward)
        for prompt in {t.prompt_id for t in batch}:
            self.visits[prompt] = self.visits.get(prompt, 0) + 1

    def _whitened(self, advantages: list[list[float]]) -> list[list[float]]:
        kind = self.config.algorithm.whitening
        if kind == "none":
            return advantages
        if kind == "tokens":
            values = [a for own in advantages for a in own]
        else:
            values = [mean(own) for own in advantages]
        centre = mean(values)
        variance = sum((v - centre) ** 2 for v in values) / (len(values) - 1)
        scale = math.sqrt(variance + 1e-8) if kind == "tokens" else math.sqrt(variance) + 1e-8
        return [[(a - centre) / scale for a in own] for own in advantages]
