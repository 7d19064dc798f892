"""Settings of `[algorithm]` and `[value]` that the other choices of a recipe leave without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common.algorithm_config import (
    LEARNED_ADVANTAGES,
    OFFLINE_ADVANTAGES,
    AlgorithmConfig,
)
from common.config import RunConfig

Rule = tuple[str, str, Callable[[RunConfig], bool]]  # a key or a table, why it is unused, and when
Unless = Callable[[AlgorithmConfig], bool]


def _has_value(a: AlgorithmConfig) -> bool:
    return a.value != "none"


def _has_gae(a: AlgorithmConfig) -> bool:
    return a.advantage in ("gae", "implicit")


def _adaptive(a: AlgorithmConfig) -> bool:
    return _has_gae(a) and a.policy_lambda == "length_adaptive"


def _has_surrogate(a: AlgorithmConfig) -> bool:
    return a.loss != "optimal_value"


def _has_offsets(a: AlgorithmConfig) -> bool:
    by_table = a.bounds == "staleness_table"
    return _has_surrogate(a) and a.trust_region in ("clip", "mask", "truncate", "probability_shift") and not by_table


def _has_band(a: AlgorithmConfig) -> bool:
    return _has_surrogate(a) and a.trust_region in ("clip", "mask", "truncate")


def _has_correction(a: AlgorithmConfig) -> bool:
    return _has_surrogate(a) and a.correction != "none"


def _has_regularisers(a: AlgorithmConfig) -> bool:
    return a.loss == "policy_gradient"


def _has_divergence_loss(a: AlgorithmConfig) -> bool:
    return _has_regularisers(a) and a.kl_coefficient > 0 and a.kl_in == "loss"


# Settings, what they need, and in words what it is that is missing.
NEEDS: tuple[tuple[tuple[str, ...], str, Unless], ...] = (
    (
        ("gamma",),
        "this recipe has no value function",
        lambda a: a.advantage in (*LEARNED_ADVANTAGES, "return", "implicit"),
    ),
    (("value_lambda",), "this recipe has no value function", _has_value),
    (("policy_lambda",), "algorithm.advantage is no GAE", _has_gae),
    (("lambda_alpha",), "there is no λ by length", _adaptive),
    (("length_stop",), "algorithm.advantage is not gae", lambda a: a.advantage == "gae"),
    (("reward_squash",), "algorithm.advantage is not hybrid", lambda a: a.advantage == "hybrid"),
    (("history",), "algorithm.advantage is not running_mean", lambda a: a.advantage == "running_mean"),
    (("retention",), "algorithm.advantage is not success_rate", lambda a: a.advantage == "success_rate"),
    (
        ("offline_samples",),
        "algorithm.advantage is neither success_rate nor optimal_value",
        lambda a: a.advantage in OFFLINE_ADVANTAGES,
    ),
    (
        ("optimal_value_beta",),
        "algorithm.advantage is not optimal_value",
        lambda a: a.advantage == "optimal_value",
    ),
    (("regression_beta",), "algorithm.loss is not optimal_value", lambda a: a.loss == "optimal_value"),
    (
        ("implicit_beta", "actor_coefficient"),
        "algorithm.loss is not implicit_value",
        lambda a: a.loss == "implicit_value",
    ),
    (("eps_low", "eps_high"), "algorithm.trust_region does not read them", _has_offsets),
    (("bounds",), "algorithm.trust_region has no bounds", _has_band),
    (
        ("eps_low_stale", "eps_high_stale"),
        "algorithm.bounds is not staleness_linear",
        lambda a: _has_band(a) and a.bounds == "staleness_linear",
    ),
    (
        ("eps_table",),
        "algorithm.bounds is not staleness_table",
        lambda a: _has_band(a) and a.bounds == "staleness_table",
    ),
    (
        ("balance_target", "balance_eps_low", "balance_eps_high", "balance_steps"),
        "algorithm.bounds is not balanced",
        lambda a: _has_band(a) and a.bounds == "balanced",
    ),
    (("dual_clip",), "algorithm.trust_region is not clip", lambda a: _has_surrogate(a) and a.trust_region == "clip"),
    (
        ("tau_positive", "tau_negative"),
        "algorithm.trust_region is not soft_gate",
        lambda a: _has_surrogate(a) and a.trust_region == "soft_gate",
    ),
    (
        ("gamma_positive", "gamma_negative"),
        "algorithm.trust_region is not gamma_weight",
        lambda a: _has_surrogate(a) and a.trust_region == "gamma_weight",
    ),
    (
        ("correction_level", "correction_low", "correction_high"),
        "algorithm.correction is none",
        _has_correction,
    ),
    (
        (
            "level",
            "reference",
            "trust_region",
            "correction",
            "aggregation",
            "veto_ratio",
            "mean_ratio_band",
            "product_ratio_band",
            "max_sequence_k3",
            "negative_drift",
            "second_moment",
        ),
        "algorithm.loss is a regression, without a ratio",
        _has_surrogate,
    ),
    (("kl_coefficient", "nll_coefficient"), "algorithm.loss has its own terms", _has_regularisers),
    (("kl_estimator", "kl_in"), "algorithm.kl_coefficient is 0", lambda a: a.kl_coefficient > 0),
    (("kl_corrected",), "there is no divergence in the loss", _has_divergence_loss),
    (("nll_above",), "algorithm.nll_coefficient is 0", lambda a: _has_regularisers(a) and a.nll_coefficient > 0),
)


def _rules() -> Iterator[Rule]:
    yield "value", "this recipe has no value function", lambda c: not _has_value(c.algorithm)
    for names, reason, needed in NEEDS:
        for name in names:
            yield f"algorithm.{name}", reason, lambda c, needed=needed: not needed(c.algorithm)  # type: ignore[misc]
    yield (
        "value.freeze_attention",
        "the value function is a head on the policy",
        lambda c: c.algorithm.value == "policy_head",
    )
    yield (
        "algorithm.reject_stale_sequences",
        'staleness.on_exceeded is not "mask", or staleness.bound is 0',
        lambda c: c.staleness.on_exceeded != "mask" or c.staleness.bound == 0,
    )


ALGORITHM_RULES: tuple[Rule, ...] = tuple(_rules())
