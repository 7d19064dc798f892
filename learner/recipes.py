"""Named algorithms. A recipe is a row of settings and nothing else: every value can be set in the config file instead.

Settings are dotted keys of `common/config.py`; docs/algorithms.md has each row's equation, and where it departs
from its source. Imports neither torch nor ray, so that the command line stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One row of `slipstream recipes`."""

    name: str
    summary: str  # one line
    source: str
    settings: Settings  # dotted key -> value


def algorithm(**settings: Any) -> Settings:
    """Keys of `[algorithm]`."""
    return {f"algorithm.{name}": value for name, value in settings.items()}


# Where advantages come from

SINGLE_ROLLOUT: Settings = {
    "groups.size": 1,
    **algorithm(advantage="gae", value="own_model", gamma=1.0, policy_lambda="length_adaptive", lambda_alpha=1.5),
    "algorithm.value_lambda": 1.0,
    "value.updates_per_batch": 2,
    "value.warmup_batches": 10,
    "value.freeze_attention": True,
}
GROUP: Settings = {
    "groups.size": 8,
    "algorithm.advantage": "group_mean_std",
    "algorithm.value": "none",
}
CRITIC: Settings = {
    "groups.size": 1,
    **algorithm(advantage="gae", value="own_model", gamma=1.0, policy_lambda=0.95, value_lambda=0.95),
    **algorithm(whitening="tokens"),
    "value.updates_per_batch": 1,
    "value.freeze_attention": False,
    "value.clip_range": 0.2,
}
PROMPT_MEMORY: Settings = {"groups.size": 1, "algorithm.value": "none"}

# What bounds an update

DOUBLE_SIDED_MASK: Settings = algorithm(
    reference="behaviour", trust_region="mask", eps_low=0.3, eps_high=5.0, aggregation="token_mean"
)
CLIP: Settings = algorithm(reference="proximal", trust_region="clip", eps_low=0.2, eps_high=0.2)
CLIP_HIGHER: Settings = {**CLIP, "algorithm.eps_high": 0.28}
MINIBATCHES: Settings = algorithm(minibatches=4)  # a clip acts from the second update on a batch

TOKEN_MEAN: Settings = algorithm(aggregation="token_mean")
SEQUENCE_MEAN: Settings = algorithm(aggregation="sequence_mean")

SAO = "Single-rollout Asynchronous Optimization, arXiv 2607.07508"
PPO = "arXiv 1707.06347"
GRPO = "arXiv 2402.03300"
VAPO = "arXiv 2504.05118"
AREAL = "AReaL, arXiv 2505.24298"

SINGLE_ROLLOUT_ROWS = (
    Recipe(
        name="sao",
        summary="Single rollouts, value model of its own, double-sided mask on the ratio to the behaviour policy.",
        source=SAO,
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK},
    ),
    Recipe(
        name="sao-head",
        summary="As sao, with the value as a head on the policy's trunk: half the memory, a weaker baseline.",
        source=f"{SAO}; the head is a simplification of ours",
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK, "algorithm.value": "policy_head"},
    ),
    Recipe(
        name="sao-one-value-update",
        summary="Ablation of sao: one value update on a batch, not two.",
        source=f"{SAO}, ablation",
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK, "value.updates_per_batch": 1},
    ),
    Recipe(
        name="sao-full-value",
        summary="Ablation of sao: the value model's attention trains too.",
        source=f"{SAO}, ablation",
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK, "value.freeze_attention": False},
    ),
    Recipe(
        name="sao-clip",
        summary="Ablation of sao: VAPO's clip of the proximal ratio in place of the double-sided mask.",
        source=f"{SAO}, ablation; {VAPO}",
        settings={**SINGLE_ROLLOUT, **CLIP_HIGHER, **MINIBATCHES, **TOKEN_MEAN},
    ),
    Recipe(
        name="sao-running-mean",
        summary="Ablation of sao: the mean of the prompt's last 8 rewards as the baseline, no value model.",
        source=f"{SAO}, ablation",
        settings={**PROMPT_MEMORY, "algorithm.advantage": "running_mean", "algorithm.history": 8, **DOUBLE_SIDED_MASK},
    ),
    Recipe(
        name="sao-turn-mean",
        summary="Ablation of sao: one value for each turn, the mean over its tokens.",
        source=f"{SAO}, ablation",
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK, "value.granularity": "turn_mean"},
    ),
    Recipe(
        name="sao-turn-last",
        summary="Ablation of sao: one value for each turn, at its last token.",
        source=f"{SAO}, ablation",
        settings={**SINGLE_ROLLOUT, **DOUBLE_SIDED_MASK, "value.granularity": "turn_last"},
    ),
)
CRITIC_ROWS = (
    Recipe(
        name="ppo",
        summary="Value model, GAE with λ 0.95, clip to 0.8 and 1.2, four updates on a batch.",
        source=f"{PPO}; arXiv 1506.02438",
        settings={**CRITIC, **CLIP, **MINIBATCHES, **TOKEN_MEAN},
    ),
    Recipe(
        name="vc-ppo",
        summary="As ppo, with a value model trained beforehand and on plain returns.",
        source="arXiv 2503.01491",
        settings={
            **CRITIC,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            "algorithm.value_lambda": 1.0,
            "value.warmup_batches": 10,
        },
    ),
    Recipe(
        name="vapo",
        summary="As vc-ppo, with λ by length, a higher upper clip, groups of 8 and imitation of correct responses.",
        source=VAPO,
        settings={
            **CRITIC,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **TOKEN_MEAN,
            "groups.size": 8,
            **algorithm(policy_lambda="length_adaptive", lambda_alpha=0.05, value_lambda=1.0, nll_coefficient=0.1),
            "value.warmup_batches": 10,
        },
    ),
    Recipe(
        name="hybrid-grpo",
        summary="Unconfirmed formula: the group's mean reward in a one-step advantage with a value model.",
        source="arXiv 2502.01652, of which the abstract alone could be read",
        settings={
            **CRITIC,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            "groups.size": 8,
            **algorithm(advantage="hybrid", policy_lambda="length_adaptive", value_lambda=1.0, whitening="none"),
        },
    ),
)
GROUP_ROWS = (
    Recipe(
        name="grpo",
        summary="Groups of 8, the group's mean and deviation as the baseline, ratio to the recomputed policy.",
        source=GRPO,
        settings={**GROUP, **CLIP, **SEQUENCE_MEAN},
    ),
    Recipe(
        name="clip-higher",
        summary="As grpo with four updates on a batch and the upper clip at 1.28.",
        source="DAPO, arXiv 2503.14476",
        settings={**GROUP, **CLIP_HIGHER, **MINIBATCHES, **SEQUENCE_MEAN},
    ),
    Recipe(
        name="dapo",
        summary="As clip-higher with a mean over tokens, without uninformative groups, with a penalty on length.",
        source="arXiv 2503.14476",
        settings={
            **GROUP,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(drop_uninformative=True, overlong_share=0.2),
        },
    ),
    Recipe(
        name="dr-grpo",
        summary="Group mean without division by the deviation, sum over a constant length.",
        source="arXiv 2503.20783",
        settings={**GROUP, **CLIP, **MINIBATCHES, **algorithm(advantage="group_mean", aggregation="fixed_length")},
    ),
    Recipe(
        name="rloo",
        summary="The mean of the group's others as the baseline, one update on a batch.",
        source="arXiv 2402.14740",
        settings={**GROUP, **CLIP, **algorithm(advantage="leave_one_out", aggregation="sequence_sum")},
    ),
    Recipe(
        name="reinforce++",
        summary="Single rollouts, return with a penalty on divergence, whitened over the batch's tokens.",
        source="arXiv 2501.03262",
        settings={
            **PROMPT_MEMORY,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(advantage="return", whitening="tokens", kl_coefficient=0.01, kl_estimator="k1", kl_in="reward"),
        },
    ),
    Recipe(
        name="reinforce++-baseline",
        summary="Group mean as the baseline, whitened over the batch's tokens, divergence in the loss.",
        source="arXiv 2501.03262",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(advantage="group_mean", whitening="tokens", kl_coefficient=0.01, kl_estimator="k2"),
        },
    ),
    Recipe(
        name="gspo",
        summary="Clip of the sequence's geometric mean ratio, whole responses are kept or not.",
        source="arXiv 2507.18071",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **SEQUENCE_MEAN,
            **algorithm(level="sequence", eps_low=3e-4, eps_high=4e-4),
        },
    ),
    Recipe(
        name="gspo-token",
        summary="As gspo, with the token's own gradient.",
        source="arXiv 2507.18071",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **SEQUENCE_MEAN,
            **algorithm(level="sequence_token", eps_low=3e-4, eps_high=4e-4),
        },
    ),
    Recipe(
        name="cispo",
        summary="Ratios capped at 1.28 as constant weights: every token keeps its gradient.",
        source="MiniMax-M1, arXiv 2506.13585",
        settings={
            **GROUP,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(trust_region="truncate", eps_low=1.0),
        },
    ),
    Recipe(
        name="sapo",
        summary="A smooth gate on the ratio, sharper where the advantage is negative.",
        source="arXiv 2511.20347",
        settings={
            **GROUP,
            **MINIBATCHES,
            **SEQUENCE_MEAN,
            **algorithm(reference="proximal", trust_region="soft_gate", tau_positive=1.0, tau_negative=1.05),
        },
    ),
    Recipe(
        name="dcpo",
        summary="Clip bounds by the token's old probability, advantages smoothed over a prompt's visits.",
        source="arXiv 2509.02333",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **algorithm(advantage="smoothed", bounds="probability", eps_low=0.16, aggregation="sum_of_means"),
        },
    ),
    Recipe(
        name="bapo",
        summary="Clip bounds searched so that positive and negative gradients balance.",
        source="arXiv 2510.18927",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(bounds="balanced", eps_low=0.4, eps_high=0.2, dual_clip=3.0),
        },
    ),
)
OFF_POLICY_ROWS = (
    Recipe(
        name="grpo-dis",
        summary="Groups of 8 with sao's double-sided mask: no value model, robust to stale rollouts.",
        source=f"{SAO}, section 4; {GRPO}",
        settings={**GROUP, **DOUBLE_SIDED_MASK},
    ),
    Recipe(
        name="tis",
        summary="Clip of the proximal ratio, weighted by the truncated ratio of proximal to behaviour policy.",
        source="F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025",
        settings={**GROUP, **CLIP, **MINIBATCHES, **SEQUENCE_MEAN, **algorithm(correction="truncated")},
    ),
    Recipe(
        name="icepop",
        summary="As tis, but a token whose ratio of proximal to behaviour policy leaves a band is left out.",
        source="Ling team, IcePop, 2025; GLM-5, arXiv 2602.15763",
        settings={
            **GROUP,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **SEQUENCE_MEAN,
            **algorithm(correction="banded", correction_low=0.5, correction_high=2.0),
        },
    ),
    Recipe(
        name="decoupled-ppo",
        summary="Clip around the proximal policy, weighted by its ratio to the behaviour policy up to 5.",
        source=AREAL,
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(correction="banded", correction_high=5.0),
        },
    ),
    Recipe(
        name="a-3po",
        summary="As decoupled-ppo, with the proximal policy interpolated by staleness: no pass to recompute it.",
        source="arXiv 2512.06547",
        settings={
            **GROUP,
            **CLIP,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(reference="interpolated", correction="banded", correction_high=5.0),
        },
    ),
    Recipe(
        name="m2po",
        summary="Tokens of largest squared log ratio are left out until the mean of the rest is below 0.04.",
        source="arXiv 2510.01161",
        settings={**GROUP, **TOKEN_MEAN, **algorithm(trust_region="none", second_moment=0.04)},
    ),
    Recipe(
        name="vcpo",
        summary="Step size by effective sample size, the baseline of least gradient variance, sequence ratios up to 8.",
        source="arXiv 2602.17616",
        settings={
            **GROUP,
            **SEQUENCE_MEAN,
            **algorithm(advantage="least_variance", level="sequence_product", trust_region="truncate"),
            **algorithm(eps_low=1.0, eps_high=7.0, learning_rate_scale="effective_samples"),
        },
    ),
    Recipe(
        name="vespo",
        summary="A smooth weight on the ratio of the whole sequence, which fades on both sides of 1.",
        source="arXiv 2602.10693",
        settings={**GROUP, **TOKEN_MEAN, **algorithm(level="sequence_product", trust_region="gamma_weight")},
    ),
    Recipe(
        name="dppo",
        summary="Tokens whose probability has moved by more than 0.2 in the advantage's direction are left out.",
        source="arXiv 2602.04879",
        settings={
            **GROUP,
            **TOKEN_MEAN,
            **algorithm(trust_region="probability_shift", eps_low=0.2, eps_high=0.2),
        },
    ),
    Recipe(
        name="opsm",
        summary="As grpo with four updates, without bad responses that have become unlikely since they were sampled.",
        source="DeepSeek-V3.2",
        settings={**GROUP, **CLIP, **MINIBATCHES, **SEQUENCE_MEAN, **algorithm(negative_drift=1e-4)},
    ),
)
VALUE_TABLE_ROWS = (
    Recipe(
        name="spo",
        summary="Single rollouts, a success rate remembered for each prompt as the baseline.",
        source="arXiv 2509.13232",
        settings={
            **PROMPT_MEMORY,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(advantage="success_rate", offline_samples=8, whitening="trajectories", dual_clip=10.0),
        },
    ),
    Recipe(
        name="vimpo",
        summary="The policy's own log ratio to the starting model as the value, exact divergence, no value model.",
        source="arXiv 2606.20008",
        settings={
            **GROUP,
            **CLIP_HIGHER,
            **MINIBATCHES,
            **TOKEN_MEAN,
            **algorithm(loss="implicit_value", advantage="implicit", policy_lambda=1.0, whitening="tokens"),
            "algorithm.dual_clip": 10.0,
        },
    ),
    Recipe(
        name="a-star-po",
        summary="Regression of the log ratio to the starting model on reward minus an optimal value estimated before.",
        source="arXiv 2505.20686",
        settings={
            **PROMPT_MEMORY,
            **algorithm(loss="optimal_value", advantage="optimal_value", offline_samples=8, optimal_value_beta=0.5),
            **algorithm(regression_beta=1e-3),
        },
    ),
)
ROWS = (*SINGLE_ROLLOUT_ROWS, *CRITIC_ROWS, *GROUP_ROWS, *OFF_POLICY_ROWS, *VALUE_TABLE_ROWS)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in ROWS}


def recipe_settings() -> dict[str, dict[str, Any]]:
    """Settings of every recipe by its name, as `common.config_load.load_config` takes them."""
    return {name: dict(recipe.settings) for name, recipe in RECIPES.items()}
