"""A whole learner step written again, slowly and in float64, from the formulas: one trajectory and one token at a time.

It shares no code with `learner/`: full logits, Python loops, AdamW by hand. Supports what the recipes use.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.config import RunConfig
from common.types import FinishReason, Trajectory

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
        self.policy_adam = self._adam({n: p for n, p in self.model.named_parameters() if p.requires_grad})
        self.trunk: Any = None
        self.head: Callable[[Tensor], Tensor]
        if config.algorithm.value == "own_model":
            self.trunk = copy.deepcopy(learner.value._trunk.module).double()
            head = copy.deepcopy(learner.value._head).double()
            named = {f"trunk.{name}": p for name, p in self.trunk.named_parameters() if "mlp" in name or "norm" in name}
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

    def logprobs(self, t: Trajectory) -> list[Tensor]:
        """Of the sampled tokens, at the trajectory's temperature."""
        ids = torch.tensor(t.token_ids.astype("int64"))
        logits = self.model(input_ids=ids[None]).logits[0].double() / t.temperature
        out = []
        for place in range(len(ids)):
            if t.loss_mask[place]:
                row = logits[place - 1]
                out.append(row[ids[place]] - torch.log(torch.exp(row - row.max()).sum()) - row.max())
        return out

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

    def gae(self, t: Trajectory, lam: float) -> tuple[list[float], list[float]]:
        """Advantages, and advantages + values."""
        algorithm = self.config.algorithm
        values, final = self.values(t)
        rewards = [0.0] * len(t.token_ids)
        for turn in t.turns:
            rewards[turn.stop - 1] += turn.reward
        assert t.reward is not None
        rewards[t.turns[-1].stop - 1] += t.reward - sum(turn.reward for turn in t.turns)
        sampled = [reward for reward, mask in zip(rewards, t.loss_mask, strict=True) if mask]
        cut = algorithm.length_stop == "bootstrap" and t.finish_reason is FinishReason.LENGTH
        following, advantage = (float(final) if cut else 0.0), 0.0
        advantages, returns = [], []
        for value, reward in zip(reversed(values), reversed(sampled), strict=True):
            delta = reward + algorithm.gamma * following - float(value.detach())
            advantage = delta + algorithm.gamma * lam * advantage
            following = float(value.detach())
            advantages.insert(0, advantage)
            returns.insert(0, advantage + float(value.detach()))
        return advantages, returns

    # --- the step ---

    def update(self, batch: Sequence[Trajectory], version: int, rate: float) -> dict[str, float]:
        metrics: dict[str, float] = {}
        algorithm = self.config.algorithm
        if algorithm.value != "none":
            self._update_values(batch, metrics)
            advantages = []
            for t in batch:
                lam = algorithm.policy_lambda
                if lam == "length_adaptive":
                    lam = max(0.0, 1 - 1 / (algorithm.lambda_alpha * t.num_sampled))
                advantages.append(self.gae(t, lam)[0])
        else:
            advantages = [[a] * t.num_sampled for t, a in zip(batch, self._group_advantages(batch), strict=True)]
        loss, masked, rejected = self._policy_loss(batch, advantages, version)
        metrics["policy/loss"] = float(loss.detach())
        metrics["policy/masked_tokens"] = masked
        metrics["policy/rejected_tokens"] = rejected
        metrics["policy/grad_norm"] = self.policy_adam.step(loss, rate)
        return metrics

    def _update_values(self, batch: Sequence[Trajectory], metrics: dict[str, float]) -> None:
        targets = [self.gae(t, self.config.algorithm.value_lambda)[1] for t in batch]
        total = sum(t.num_sampled for t in batch)
        for _ in range(self.config.value.updates_per_batch):
            loss = torch.zeros((), dtype=torch.float64)
            for t, returns in zip(batch, targets, strict=True):
                for value, target in zip(self.values(t)[0], returns, strict=True):
                    loss = loss + (value - target) ** 2 / total
            metrics["value/loss"] = float(loss.detach())
            metrics["value/grad_norm"] = self.value_adam.step(loss, self.config.value.learning_rate)

    def _group_advantages(self, batch: Sequence[Trajectory]) -> list[float]:
        out = []
        for t in batch:
            rewards = [float(other.reward or 0.0) for other in batch if other.group_id == t.group_id]
            mean = sum(rewards) / len(rewards)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            out.append((float(t.reward or 0.0) - mean) / (deviation + 1e-6))
        return out

    def _policy_loss(
        self, batch: Sequence[Trajectory], advantages: Sequence[Sequence[float]], version: int
    ) -> tuple[Tensor, int, int]:
        algorithm = self.config.algorithm
        total = sum(t.num_sampled for t in batch)
        loss = torch.zeros((), dtype=torch.float64)
        masked = rejected = 0
        for t, own in zip(batch, advantages, strict=True):
            weight = 1 / total if algorithm.aggregation == "token_mean" else 1 / (len(batch) * t.num_sampled)
            recorded = t.rollout_logprobs[t.loss_mask]
            versions = t.weight_versions[t.loss_mask]
            for logprob, behaviour, a, v in zip(self.logprobs(t), recorded, own, versions, strict=True):
                if version - v > self.config.staleness.bound:
                    rejected += 1
                elif algorithm.trust_region == "mask":
                    ratio = math.exp(float(logprob) - float(behaviour))
                    if 1 - algorithm.eps_low < ratio < 1 + algorithm.eps_high:
                        loss = loss - weight * ratio * a * logprob
                    else:
                        masked += 1
                else:  # clip, proximal: the policy before the only step is the current one
                    loss = loss - weight * a * torch.exp(logprob - logprob.detach())
        return loss, masked, rejected
