"""What an evaluation of held-out prompts gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.episode import Rollout
from common.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """One evaluation on one actor. Nothing of it is ever trained on."""

    rewards: tuple[float | None, ...]  # [n], one a prompt in their order; None: unscorable
    lengths: tuple[int, ...]  # [n], sampled tokens; 0 where nothing was generated
    truncated: int  # prompts whose response was cut off at a length limit
    oldest_version: int  # of the weights that sampled a token; -1 when none was sampled
    newest_version: int
    errors: tuple[str, ...]  # why prompts are unscorable, at most `MAX_ERRORS`

    @property
    def count(self) -> int:
        """Prompts with a reward."""
        return len(self.rewards) - self.unscorable

    @property
    def unscorable(self) -> int:
        """Prompts without a reward: not scored, over-long, or failed."""
        return self.rewards.count(None)

    @property
    def reward_mean(self) -> float | None:
        """Over the prompts with a reward; none when there are none."""
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else None

    @property
    def length_mean(self) -> float | None:
        """Sampled tokens, over all prompts."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else None


MAX_ERRORS = 5


def summarise(outcomes: Sequence[Rollout | str]) -> EvaluationResult:
    """The result of these rollouts; a text says why there is none."""
    rollouts = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    versions = [version for r in rollouts for version in r.weight_versions[r.loss_mask].tolist()]
    errors = [outcome if isinstance(outcome, str) else outcome.error for outcome in outcomes]
    return EvaluationResult(
        rewards=tuple(None if isinstance(outcome, str) else outcome.reward for outcome in outcomes),
        lengths=tuple(0 if isinstance(outcome, str) else int(outcome.loss_mask.sum()) for outcome in outcomes),
        truncated=sum(r.finish_reason is FinishReason.LENGTH for r in rollouts),
        oldest_version=min(versions, default=-1),
        newest_version=max(versions, default=-1),
        errors=tuple(filter(None, errors))[:MAX_ERRORS],
    )
