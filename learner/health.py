"""What shows early that training goes wrong: what was masked and why, how gradients point, how far a step goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common.algorithm_config import AlgorithmConfig
from common.run_metrics import MASK_RULES, MASK_SIDES, MASK_SIGNS, STALENESS_BUCKETS, masked_name
from learner.batching import Layout, TokenBatch, build
from learner.importance import Surrogate
from learner.optimizer import Optimizer
from learner.policy import Policy
from learner.step_metrics import StepMetrics
from learner.token_loss import HAS_BAND

GRADIENT_SAMPLE = 2**20  # entries of the gradient that are compared from update to update
PROBE_TRAJECTORIES = 4
PROBE_TOKENS = 512  # read by the model after a step; a longer first trajectory is read all the same
CELLS = len(STALENESS_BUCKETS) * len(MASK_RULES) * len(MASK_SIDES) * len(MASK_SIGNS)


def count_masked(
    surrogate: Surrogate,
    moved: Tensor,
    advantages: Tensor,
    staleness: Tensor,
    fresh: Tensor,
    kept: Tensor,
    correction: Tensor | None,
) -> Tensor:
    """[CELLS] int64: tokens without gradient by staleness bucket, rule, side of the ratio, and sign of the advantage.

    The first rule that applies counts: `stale` beyond the bound, `rejected` by another rule or a correction of 0,
    `region` outside the trust region. Side: the ratio is above 1, or not: the one that the trust region judged, and for
    the other rules that to the behaviour policy. Sign: the advantage is positive, or not.

    Args:
        surrogate, advantages, staleness: of n tokens.
        moved: [n], log ratio to the behaviour policy.
        fresh: [n] bool, within the staleness bound. kept: [n] bool, no rule rejects it.
        correction: [n], weights; None: 1.
    """
    kept = kept if correction is None else kept & (correction != 0)
    uppers = torch.tensor([highest for _, highest in STALENESS_BUCKETS if highest is not None], device=staleness.device)
    bucket = torch.bucketize(staleness, uppers)
    rule = torch.where(kept, 2, torch.where(fresh, 1, 0))
    above = torch.where(kept, surrogate.log_ratios > 0, moved > 0)
    cell = (bucket * len(MASK_RULES) + rule) * len(MASK_SIDES) + above.long()
    cell = cell * len(MASK_SIGNS) + (advantages > 0).long()
    left_out = ~kept | ~surrogate.active
    return torch.bincount(cell[left_out], minlength=CELLS)


def describe_masked(table: Tensor) -> StepMetrics:
    """Cells of `count_masked` that are not 0, by their names."""
    counts = table.tolist()
    names = [
        masked_name(bucket, rule, side, sign)
        for bucket in STALENESS_BUCKETS
        for rule in MASK_RULES
        for side in MASK_SIDES
        for sign in MASK_SIGNS
    ]
    return {name: float(count) for name, count in zip(names, counts, strict=True) if count}


class GradientTrail:
    """Cosine of the gradients of consecutive updates. Source: GAC, arXiv 2603.01501.

    About a million entries at fixed places stand for the gradient; of a model no larger than that, it is exact. Not
    part of a checkpoint: the number is missing after a restore, and nothing else depends on it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._last: Tensor | None = None
        self._next: Tensor | None = None

    def follow(self) -> StepMetrics:
        """Compare the gradient that is about to be applied with the one before it."""
        gradient = self._optimizer.gradient_sample(GRADIENT_SAMPLE)
        last = self._last if self._next is None else self._next
        self._next = gradient
        if last is None:
            return {}
        product = float(torch.dot(gradient, last))
        length = float(torch.linalg.vector_norm(gradient)) * float(torch.linalg.vector_norm(last))
        return {"policy/grad_cosine": product / length} if length and math.isfinite(product / length) else {}

    def commit(self) -> None:
        """The batch's updates stay."""
        if self._next is not None:
            self._last, self._next = self._next, None

    def forget(self) -> None:
        """They have been undone."""
        self._next = None


class Probe:
    """How far a batch's updates moved the policy on a few of its own trajectories, against the trust region.

    A clip stops gradients, not steps: AdamW's momentum and its scaling carry on. The few trajectories cost a small
    forward pass after the last update.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, policy: Policy, batch: TokenBatch, order: Sequence[int], layout: Layout
    ) -> None:
        seqs: list[int] = []
        for seq in order[:PROBE_TRAJECTORIES]:
            if not seqs or int(batch.input_lengths[[*seqs, seq]].sum()) <= PROBE_TOKENS:
                seqs.append(seq)
        self._algorithm = algorithm
        self._policy = policy
        self._batch = batch
        self._micro = build(batch, seqs, layout)

    @torch.no_grad()
    def measure(self, before: Tensor) -> StepMetrics:
        """Args:
        before: [N], log-probs before the batch's updates.
        """
        moved = self._policy.scores(self._micro, self._batch).logprobs - before[self._micro.tokens]
        moved = moved[torch.isfinite(moved)]
        if not len(moved):
            return {}
        size = moved.abs()
        metrics = {"policy/step_log_ratio_mean": float(size.mean()), "policy/step_log_ratio_max": float(size.max())}
        low, high = -math.log1p(-min(self._algorithm.eps_low, 1 - 1e-9)), math.log1p(self._algorithm.eps_high)
        has_band = self._algorithm.trust_region in HAS_BAND and self._algorithm.level == "token"
        if has_band and low > 0 and high > 0:
            share = torch.where(moved > 0, moved / high, -moved / low)
            metrics["policy/step_over_bound_max"] = float(share.max())
        return metrics
