"""The policy loss of some tokens, put together from the components that the configuration names.

One table for each component, from the setting's value to a function; the functions themselves are in `importance.py`,
`bounds.py` and `corrections.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.algorithm_config import AlgorithmConfig
from learner.bounds import linear_offsets, probability_band, table_offsets
from learner.corrections import (
    banded_weights,
    interpolated_proximal,
    low_k3_sequences,
    on_policy_or_positive,
    probability_shift_mask,
    truncated_weights,
    veto_free_sequences,
)
from learner.importance import (
    Band,
    Surrogate,
    at_level,
    clip,
    double_sided_mask,
    gamma_weight,
    log_ratio,
    ratio,
    soft_gate,
    truncate,
)

MAX_SHIFT_RATIO = 20.0  # DPPO, as its authors' code: a ratio counts with this at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """n sampled tokens of whole trajectories, [n] each."""

    logprobs: Tensor  # nats; carries the gradient
    rollout_logprobs: Tensor
    proximal_logprobs: Tensor | None  # None: the current policy is the proximal one
    advantages: Tensor
    seq_ids: Tensor  # int64
    weight_versions: Tensor  # int64
    current_version: int
    staleness_bound: int

    @property
    def everywhere(self) -> Tensor:
        return torch.ones_like(self.seq_ids, dtype=torch.bool)

    @property
    def staleness(self) -> Tensor:
        return self.current_version - self.weight_versions

    @property
    def before_update(self) -> Tensor:
        """Log-probs of the policy before the update; constant."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs


# --- the denominator of the ratio ---


def _interpolated(tokens: Tokens) -> Tensor:
    return interpolated_proximal(
        tokens.logprobs, tokens.rollout_logprobs, tokens.weight_versions, tokens.current_version
    )


REFERENCES: Mapping[str, Callable[[Tokens], Tensor]] = {
    "behaviour": lambda tokens: tokens.rollout_logprobs,
    "proximal": lambda tokens: tokens.before_update,
    "interpolated": _interpolated,
}


# --- the bounds ---


def _linear(algorithm: AlgorithmConfig, tokens: Tokens) -> Band:
    def offsets(fresh: float, stale: float) -> Tensor:
        return linear_offsets(tokens.staleness, fresh=fresh, stale=stale, bound=tokens.staleness_bound)

    return Band.from_offsets(
        offsets(algorithm.eps_low, algorithm.eps_low_stale), offsets(algorithm.eps_high, algorithm.eps_high_stale)
    )


def _table(algorithm: AlgorithmConfig, tokens: Tokens) -> Band:
    lows, highs = zip(*algorithm.eps_table, strict=True)
    return Band.from_offsets(table_offsets(tokens.staleness, lows), table_offsets(tokens.staleness, highs))


def _constant(algorithm: AlgorithmConfig, tokens: Tokens) -> Band:
    return Band.from_offsets(algorithm.eps_low, algorithm.eps_high)


def _probability(algorithm: AlgorithmConfig, tokens: Tokens) -> Band:
    return probability_band(tokens.before_update, eps_low=algorithm.eps_low, eps_high=algorithm.eps_high)


BOUNDS: Mapping[str, Callable[[AlgorithmConfig, Tokens], Band]] = {
    "constant": _constant,
    "staleness_linear": _linear,
    "staleness_table": _table,
    "probability": _probability,
    "balanced": _constant,  # until the search of a whole minibatch has found another band
}


# --- the trust region ---


def _clip(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return clip(log_ratios, tokens.advantages, band, algorithm.dual_clip)


def _mask(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return double_sided_mask(log_ratios, tokens.logprobs, band)


def _truncate(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return truncate(log_ratios, tokens.logprobs, cap=_ratio(band.log_high), floor=_ratio(band.log_low))


def _soft_gate(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return soft_gate(
        log_ratios, tokens.advantages, tau_positive=algorithm.tau_positive, tau_negative=algorithm.tau_negative
    )


def _gamma_weight(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return gamma_weight(
        log_ratios,
        tokens.logprobs,
        tokens.advantages,
        positive=algorithm.gamma_positive,
        negative=algorithm.gamma_negative,
    )


def _probability_shift(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    """The ratio as a constant weight; no gradient where the probability has moved too far with the advantage."""
    weighted = truncate(log_ratios, tokens.logprobs, cap=MAX_SHIFT_RATIO)
    reference = tokens.logprobs.detach() - log_ratios.detach()
    near = probability_shift_mask(
        tokens.logprobs, reference, tokens.advantages, delta_low=algorithm.eps_low, delta_high=algorithm.eps_high
    )
    return Surrogate(torch.where(near, weighted.value, 0.0), weighted.active & near, weighted.log_ratios)


def _none(algorithm: AlgorithmConfig, tokens: Tokens, log_ratios: Tensor, band: Band) -> Surrogate:
    return ratio(log_ratios)


REGIONS: Mapping[str, Callable[[AlgorithmConfig, Tokens, Tensor, Band], Surrogate]] = {
    "none": _none,
    "clip": _clip,
    "mask": _mask,
    "truncate": _truncate,
    "soft_gate": _soft_gate,
    "gamma_weight": _gamma_weight,
    "probability_shift": _probability_shift,
}
HAS_BAND = {"clip", "mask", "truncate"}  # regions that read the bounds


def region_log_ratios(algorithm: AlgorithmConfig, tokens: Tokens) -> Tensor:
    """[n], the log ratio that the trust region judges, at the configured level; carries the gradient."""
    log_ratios = log_ratio(tokens.logprobs, REFERENCES[algorithm.reference](tokens))
    return at_level(log_ratios, tokens.seq_ids, tokens.everywhere, algorithm.level)


def surrogate_of(algorithm: AlgorithmConfig, tokens: Tokens, band: Band | None = None) -> Surrogate:
    """What the trust region leaves of each token; `band` in place of the configured bounds, if it is given."""
    bounds = BOUNDS[algorithm.bounds](algorithm, tokens) if band is None else band
    return REGIONS[algorithm.trust_region](algorithm, tokens, region_log_ratios(algorithm, tokens), bounds)


# --- corrections and rejections of what was off-policy before the update ---


def _truncated(algorithm: AlgorithmConfig, rho: Tensor) -> Tensor | None:
    return truncated_weights(rho, cap=_cap(algorithm), floor=algorithm.correction_low)


def _banded(algorithm: AlgorithmConfig, rho: Tensor) -> Tensor | None:
    return banded_weights(rho, Band.from_ratios(algorithm.correction_low, _cap(algorithm)))


def _cap(algorithm: AlgorithmConfig) -> float:
    return math.inf if algorithm.correction_high is None else algorithm.correction_high


CORRECTIONS: Mapping[str, Callable[[AlgorithmConfig, Tensor], Tensor | None]] = {
    "none": lambda algorithm, rho: None,
    "truncated": _truncated,
    "banded": _banded,
}


def correction_of(algorithm: AlgorithmConfig, tokens: Tokens) -> Tensor | None:
    """[n], constant weight of proximal over behaviour policy; None: 1."""
    proximal = _interpolated(tokens) if algorithm.reference == "interpolated" else tokens.before_update
    rho = at_level(
        log_ratio(proximal, tokens.rollout_logprobs), tokens.seq_ids, tokens.everywhere, algorithm.correction_level
    )
    return CORRECTIONS[algorithm.correction](algorithm, rho)


def kept_sequences(algorithm: AlgorithmConfig, tokens: Tokens) -> Tensor:
    """[n] bool; False: a rule rejects the token's whole trajectory."""
    keep, seq_ids = tokens.everywhere, tokens.seq_ids
    rho = log_ratio(tokens.before_update, tokens.rollout_logprobs)
    if algorithm.veto_ratio is not None:
        keep = keep & veto_free_sequences(rho, seq_ids, tokens.everywhere, algorithm.veto_ratio)
    for limits, level in (
        (algorithm.mean_ratio_band, "sequence"),
        (algorithm.product_ratio_band, "sequence_product"),
    ):
        if limits is not None:
            inside = Band.from_ratios(*limits).contains(
                at_level(rho, seq_ids, tokens.everywhere, level),  # type: ignore[arg-type]
                closed=True,
            )
            keep = keep & inside
    if algorithm.max_sequence_k3 is not None:
        keep = keep & low_k3_sequences(rho, seq_ids, tokens.everywhere, algorithm.max_sequence_k3)
    if algorithm.negative_drift is not None:
        keep = keep & on_policy_or_positive(
            tokens.logprobs,
            tokens.rollout_logprobs,
            tokens.advantages,
            seq_ids,
            tokens.everywhere,
            algorithm.negative_drift,
        )
    return keep


def _ratio(log_bound: Tensor | float) -> Tensor | float:
    return log_bound.exp() if isinstance(log_bound, Tensor) else math.exp(log_bound)
