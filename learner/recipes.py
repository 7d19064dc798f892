"""Named algorithms. A recipe is a row of settings and nothing else: every value can be set in the config file instead.

Settings are dotted keys of `common/config.py`. Imports neither torch nor ray, so that the command line stays quick.
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


SINGLE_ROLLOUT: Settings = {
    "groups.size": 1,
    "algorithm.advantage": "gae",
    "algorithm.value": "own_model",
    "algorithm.gamma": 1.0,
    "algorithm.policy_lambda": "length_adaptive",
    "algorithm.lambda_alpha": 1.5,
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
DOUBLE_SIDED_MASK: Settings = {
    "algorithm.reference": "behaviour",
    "algorithm.trust_region": "mask",
    "algorithm.eps_low": 0.3,
    "algorithm.eps_high": 5.0,
    "algorithm.aggregation": "token_mean",
}

SAO = "Single-rollout Asynchronous Optimization, arXiv 2607.07508"
GRPO = "arXiv 2402.03300"

ROWS = (
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
        name="grpo",
        summary="Groups of 8, the group's mean and deviation as the baseline, ratio to the recomputed policy.",
        source=GRPO,
        settings={
            **GROUP,
            "algorithm.reference": "proximal",
            "algorithm.trust_region": "clip",
            "algorithm.eps_low": 0.2,
            "algorithm.eps_high": 0.2,
            "algorithm.aggregation": "sequence_mean",
        },
    ),
    Recipe(
        name="grpo-dis",
        summary="Groups of 8 with sao's double-sided mask: no value model, robust to stale rollouts.",
        source=f"{SAO}, section 4; {GRPO}",
        settings={**GROUP, **DOUBLE_SIDED_MASK},
    ),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in ROWS}


def recipe_settings() -> dict[str, dict[str, Any]]:
    """Settings of every recipe by its name, as `common.config_load.load_config` takes them."""
    return {name: dict(recipe.settings) for name, recipe in RECIPES.items()}
