"""`[algorithm]` and `[value]`: one setting for each component of a recipe, and which of them contradict each other.

What the components do is in docs/algorithms.md. Where a paper leaves a number open, the docstring says that it is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from common.table import Table

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
RatioBand = tuple[Annotated[float, Field(ge=0)], Positive]

Advantage = Literal[
    "gae",
    "group_mean",
    "group_mean_std",
    "leave_one_out",
    "least_variance",
    "smoothed",
    "hybrid",
    "return",
    "running_mean",
    "success_rate",
    "optimal_value",
    "implicit",
]
GROUP_ADVANTAGES = {"group_mean", "group_mean_std", "leave_one_out", "least_variance", "smoothed", "hybrid", "implicit"}
LEARNED_ADVANTAGES = {"gae", "hybrid"}  # need a value function
MEMORY_ADVANTAGES = {"running_mean", "success_rate", "optimal_value", "smoothed"}  # remember something of each prompt
OFFLINE_ADVANTAGES = {"success_rate", "optimal_value"}  # may begin with samples of the starting model


class AlgorithmConfig(Table):
    """`[algorithm]`: one choice of each component; a recipe is a row of these. See docs/algorithms.md."""

    # --- the objective and its advantages ---

    loss: Literal["policy_gradient", "implicit_value", "optimal_value"] = "policy_gradient"
    """Policy gradient; VIMPO's value loss on the policy's own log ratios beside it; or A*-PO's regression alone."""

    advantage: Advantage = "gae"
    """Where advantages come from: a learned value, the group, the batch, or what is remembered of the prompt."""

    value: Literal["none", "own_model", "policy_head"] = "own_model"
    """No value function, a model of its own, or a head on the policy's trunk that does not train the trunk."""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of the GAE and of the plain return."""

    policy_lambda: Literal["length_adaptive"] | Share = "length_adaptive"
    """λ of the policy's advantages: a number, or 1 - 1/(lambda_alpha · sampled tokens of the trajectory)."""

    lambda_alpha: float = Field(1.5, gt=0)
    """Scale of the length-adaptive λ; the larger, the more an early token sees of the final reward."""

    value_lambda: float = Field(1.0, ge=0, le=1)
    """λ of the value model's targets; 1: the plain return."""

    length_stop: Literal["terminal", "bootstrap"] = "terminal"
    """A trajectory cut at the length limit ends there, or goes on with the value of the state it was cut in."""

    whitening: Literal["none", "tokens", "trajectories"] = "none"
    """Shift and scale a batch's advantages to mean 0 and deviation 1, each token or each trajectory counting once."""

    reward_squash: Literal["none", "tanh"] = "none"
    """Hybrid GRPO: average a group's rewards as they are, or tanh of their z-scores."""

    history: int = Field(8, ge=1)
    """Rewards of a prompt that its running mean is over; the paper of SAO's ablation says 8."""

    offline_samples: int = Field(0, ge=0)
    """First rewards of each prompt that only fill the memory: the weights rest until a batch has a prompt with more."""

    retention: float = Field(0.96, gt=0, le=1)
    """SPO: what a success rate keeps of its past at each visit. Ours: the paper adapts it between 0.875 and 0.96."""

    optimal_value_beta: float = Field(0.5, gt=0)
    """A*-PO: temperature of the optimal value, in reward units; the smaller, the nearer to the best sample."""

    regression_beta: float = Field(1e-3, gt=0)
    """A*-PO: reward units of one nat of the log ratio to the starting model."""

    implicit_beta: float = Field(5e-4, gt=0)
    """VIMPO: reward units of one nat of the log ratio to the starting model."""

    actor_coefficient: float = Field(5e-3, ge=0)
    """VIMPO: weight of the policy gradient beside the value loss."""

    # --- ratio and trust region ---

    level: Literal["token", "sequence", "sequence_token", "sequence_product"] = "token"
    """Ratio of the token; geometric mean over its sequence (sequence_token: with the token's own gradient); product."""

    reference: Literal["behaviour", "proximal", "interpolated"] = "behaviour"
    """Denominator of the ratio: log-probs of the engine, the learner's before the update, or between by version."""

    trust_region: Literal["none", "clip", "mask", "truncate", "soft_gate", "gamma_weight", "probability_shift"] = "mask"
    """No limit, PPO's clip, DIS's mask, CISPO's cap, SAPO's gate, VESPO's weight, or DPPO's change of probability."""

    eps_low: float = Field(0.3, ge=0, le=1)
    """Offset below 1 of the ratio's band: 0.3 allows ratios down to 0.7. Of a probability for probability_shift."""

    eps_high: float = Field(5.0, ge=0)
    """Offset above 1 of the ratio's band, not a ratio: 5.0 allows ratios up to 6.0. Probabilities as above."""

    bounds: Literal["constant", "staleness_linear", "staleness_table", "probability", "balanced"] = "constant"
    """The offsets as they are, by the token's staleness, by its old probability (DCPO), or searched (BAPO)."""

    eps_low_stale: float = Field(0.1, ge=0, le=1)
    """`staleness_linear`: eps_low of a token as stale as the bound; in a line from eps_low at 0. Ours."""

    eps_high_stale: float = Field(0.1, ge=0)
    """`staleness_linear`: eps_high of a token as stale as the bound. Ours."""

    eps_table: tuple[tuple[Share, Annotated[float, Field(ge=0)]], ...] = ()
    """`staleness_table`: [eps_low, eps_high] of staleness 0, 1, 2 ...; the last serves everything staler."""

    balance_target: float = Field(0.667, gt=0)
    """`balanced`: wanted positive over negative gradient. Ours from a share of 0.4 positive, which is recalled."""

    balance_eps_low: float = Field(0.1, ge=0, le=1)
    """`balanced`: eps_low goes from its setting down to this, first."""

    balance_eps_high: float = Field(2.0, ge=0)
    """`balanced`: eps_high goes from its setting up to this, second."""

    balance_steps: int = Field(10, ge=1)
    """`balanced`: steps of each of the two searches. Ours."""

    dual_clip: float | None = Field(None, gt=1)
    """`clip`: largest ratio that a token of negative advantage counts with; none: no limit."""

    tau_positive: float = Field(1.0, gt=0)
    """`soft_gate`: sharpness where the advantage is positive."""

    tau_negative: float = Field(1.05, gt=0)
    """`soft_gate`: sharpness where the advantage is negative."""

    gamma_positive: tuple[Positive, Positive] = (2.0, 3.0)
    """`gamma_weight`: exponent and rate where the advantage is positive."""

    gamma_negative: tuple[Positive, Positive] = (3.0, 2.0)
    """`gamma_weight`: exponent and rate where the advantage is negative."""

    # --- what was off-policy before the update ---

    correction: Literal["none", "truncated", "banded"] = "none"
    """Weight by the ratio of proximal to behaviour policy: not, truncated (TIS), or 0 outside a band (IcePop)."""

    correction_level: Literal["token", "sequence", "sequence_product"] = "token"
    """Ratio of the token, geometric mean over its sequence, or product."""

    correction_low: float = Field(0.0, ge=0)
    """Smallest weight, as a ratio."""

    correction_high: float | None = Field(2.0, gt=0)
    """Largest weight, as a ratio; none: no limit."""

    reject_stale_sequences: bool = False
    """One token staler than the bound rejects its whole trajectory from the loss, not only itself."""

    veto_ratio: float | None = Field(None, gt=0, lt=1)
    """A token whose ratio of proximal to behaviour policy is below this rejects its trajectory; usual: 1e-4."""

    mean_ratio_band: RatioBand | None = None
    """Trajectories whose geometric mean of that ratio leaves this closed band are rejected; usual: [0.999, 1.001]."""

    product_ratio_band: RatioBand | None = None
    """Trajectories whose product of that ratio leaves this closed band are rejected; long ones leave it first."""

    max_sequence_k3: float | None = Field(None, gt=0)
    """Trajectories whose mean k3 of that ratio exceeds this many nats are rejected; usual: 0.001 to 0.01."""

    negative_drift: float | None = Field(None, ge=0)
    """OPSM: of negative advantage, trajectories that lost more nats a token than this since sampling are rejected."""

    second_moment: float | None = Field(None, gt=0)
    """M2PO: tokens of largest squared log ratio are rejected until the mean of the rest is below this; usual: 0.04."""

    # --- aggregation and updates ---

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sum_of_means", "fixed_length"] = "token_mean"
    """Mean over all sampled tokens; mean of trajectories' means or sums; sum of means; sum over a constant length."""

    minibatches: int = Field(1, ge=1)
    """Parts that a batch is cut into, one optimizer update each; the weight version moves once a batch all the same."""

    epochs: int = Field(1, ge=1)
    """Times that the policy learns from a batch."""

    learning_rate_scale: Literal["none", "effective_samples"] = "none"
    """VCPO: step size times the root of the share of trajectories that still count, by the weights of the sequences."""

    overlong_share: float = Field(0.0, ge=0, le=1)
    """DAPO: last share of the response limit over which the reward falls in a line by 1; 0: no penalty."""

    drop_uninformative: bool = False
    """DAPO: groups whose rewards do not differ leave the denominators too, as if they had not been sampled."""

    # --- regularisers ---

    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL divergence to the starting model; above 0 the learner holds a frozen copy of it."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """log ratio x; x²/2, in the loss exactly the gradient of the divergence; exp(-x) - 1 + x, that of the reverse."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from each token's reward (k1)."""

    kl_corrected: bool = False
    """Multiply the loss's estimate by the ratio to the behaviour policy: exact gradients for k1 and k3."""

    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    nll_coefficient: float = Field(0.0, ge=0)
    """VAPO: weight of plain imitation of correct trajectories."""

    nll_above: float = 0.5
    """Reward above which a trajectory is correct. Ours: papers have rewards of 0 and 1."""


class ValueConfig(Table):
    """`[value]`: the value function of recipes that have one."""

    learning_rate: float = Field(1e-3, gt=0)
    """Step size of the value function's own optimizer."""

    updates_per_batch: int = Field(2, ge=1)
    """Value updates on a batch before its advantages are computed."""

    warmup_batches: int = Field(0, ge=0)
    """First batches that train only the value function."""

    freeze_attention: bool = True
    """Keep the attention of an own value model as in the starting model."""

    clip_range: float | None = Field(None, gt=0)
    """PPO: a value gains nothing by moving further than this from where it was before the batch; none: no clip."""

    granularity: Literal["token", "turn_mean", "turn_last"] = "token"
    """States of the GAE: tokens; or turns, valued by the mean over their tokens or by the last one (SAO's ablation)."""


def updates_per_batch(algorithm: AlgorithmConfig) -> int:
    """Optimizer updates of the policy on one batch at most."""
    return algorithm.minibatches * algorithm.epochs


def needs_starting_model(algorithm: AlgorithmConfig) -> bool:
    """The learner holds a frozen copy of the starting model."""
    return algorithm.kl_coefficient > 0 or algorithm.loss != "policy_gradient"


def rejects_sequences(algorithm: AlgorithmConfig) -> bool:
    """A rule looks at the ratio of the proximal to the behaviour policy over whole trajectories."""
    rules = (algorithm.veto_ratio, algorithm.mean_ratio_band, algorithm.product_ratio_band, algorithm.max_sequence_k3)
    return any(rule is not None for rule in rules)


def sees_staleness(algorithm: AlgorithmConfig) -> bool:
    """Something in the loss reacts to how far the policy had moved between a token's sampling and its batch."""
    if algorithm.loss == "optimal_value":
        return True  # its regression has the same solution whoever sampled
    if algorithm.reference != "proximal" or algorithm.correction != "none" or rejects_sequences(algorithm):
        return True
    return algorithm.second_moment is not None or algorithm.negative_drift is not None


def is_unbounded(algorithm: AlgorithmConfig) -> bool:
    """Nothing limits what a token does to the policy, however far its ratio is from 1."""
    rules = (algorithm.second_moment, algorithm.negative_drift)
    rejects = rejects_sequences(algorithm) or any(rule is not None for rule in rules)
    corrects = algorithm.correction != "none" or rejects or algorithm.loss == "optimal_value"
    return algorithm.trust_region == "none" and not corrects


def impossible_algorithms(algorithm: AlgorithmConfig, value: ValueConfig, group_size: int) -> Iterator[str]:
    """Choices of components that cannot work together, each with the reason and the remedy."""
    yield from _impossible_advantages(algorithm, value, group_size)
    yield from _impossible_objectives(algorithm)
    yield from _impossible_ratios(algorithm)


def _impossible_advantages(algorithm: AlgorithmConfig, value: ValueConfig, group_size: int) -> Iterator[str]:
    kind = algorithm.advantage
    learned = kind in LEARNED_ADVANTAGES
    if learned and algorithm.value == "none":
        yield (
            f'algorithm.advantage = "{kind}" needs a value function: set algorithm.value to own_model or policy_head'
        )
    if kind in GROUP_ADVANTAGES and group_size < 2:
        yield (
            f'algorithm.advantage = "{kind}" compares members of a group, and groups.size = '
            f"{group_size}: set groups.size to 2 or more, or take a recipe with a value model"
        )
    if not learned and algorithm.value != "none":
        yield (
            f'algorithm.value = "{algorithm.value}" is not used by algorithm.advantage = "{kind}": '
            'set algorithm.value = "none"'
        )
    if algorithm.drop_uninformative and kind not in GROUP_ADVANTAGES:
        yield (
            f'algorithm.drop_uninformative drops groups, and algorithm.advantage = "{kind}" does not compare members '
            "of one: set it to false"
        )
    if kind == "optimal_value" and not algorithm.offline_samples:
        yield (
            'algorithm.advantage = "optimal_value" reads values that are estimated beforehand: set '
            "algorithm.offline_samples to 1 or more"
        )
    if value.clip_range is not None and value.granularity != "token" and learned:
        yield (
            f'value.clip_range = {value.clip_range} is for values of tokens, and value.granularity is "'
            f'{value.granularity}": set value.clip_range = "none"'
        )
    if algorithm.length_stop == "bootstrap" and kind == "hybrid":
        yield (
            'algorithm.length_stop = "bootstrap" is not defined for algorithm.advantage = "hybrid": set it to terminal'
        )


def _impossible_objectives(algorithm: AlgorithmConfig) -> Iterator[str]:
    kind = algorithm.advantage
    wanted = {"implicit_value": "implicit", "optimal_value": "optimal_value"}.get(algorithm.loss)
    if wanted and kind != wanted:
        yield (
            f'algorithm.loss = "{algorithm.loss}" goes with algorithm.advantage = "{wanted}", not "{kind}": '
            "change one of them"
        )
    if kind == "implicit" and algorithm.loss != "implicit_value":
        yield (
            'algorithm.advantage = "implicit" is made by algorithm.loss = "implicit_value": without it the policy '
            "holds no value; set the loss, or another advantage"
        )
    if kind == "implicit" and algorithm.policy_lambda == "length_adaptive":
        yield (
            'algorithm.advantage = "implicit" has no λ by length: set algorithm.policy_lambda to a number, such as 1.0'
        )
    if algorithm.loss == "optimal_value" and algorithm.whitening != "none":
        yield (
            f'algorithm.whitening = "{algorithm.whitening}" changes the target that algorithm.loss = "optimal_value" '
            'regresses on: set it to "none"'
        )
    shaped = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward"
    if shaped and algorithm.kl_estimator != "k1":
        yield (
            f'algorithm.kl_estimator = "{algorithm.kl_estimator}" in the reward gives no gradient of the divergence: '
            "set it to k1"
        )
    if shaped and algorithm.loss != "policy_gradient":
        yield f'algorithm.kl_in = "reward" with algorithm.loss = "{algorithm.loss}" counts the divergence twice'
    unguided = algorithm.kl_coefficient > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1"
    if unguided and not algorithm.kl_corrected:
        yield (
            'algorithm.kl_estimator = "k1" in the loss has no gradient on average: take k2 or k3, set '
            "algorithm.kl_corrected = true, or algorithm.kl_in to reward"
        )


def _impossible_ratios(algorithm: AlgorithmConfig) -> Iterator[str]:
    region, bounds = algorithm.trust_region, algorithm.bounds
    if algorithm.correction != "none" and algorithm.reference == "behaviour":
        yield (
            f'algorithm.correction = "{algorithm.correction}" beside algorithm.reference = "behaviour" weights every '
            "token twice: take a proximal or interpolated reference, or no correction"
        )
    if region == "probability_shift" and (algorithm.level != "token" or bounds == "probability"):
        yield (
            'algorithm.trust_region = "probability_shift" bounds the probability of a token: set algorithm.level = '
            '"token" and another algorithm.bounds'
        )
    if bounds == "balanced" and region != "clip":
        yield f'algorithm.bounds = "balanced" searches bounds of a clip, and algorithm.trust_region is "{region}"'
    if bounds == "staleness_table" and not algorithm.eps_table:
        yield 'algorithm.bounds = "staleness_table" needs algorithm.eps_table, such as [[0.3, 5.0], [0.2, 2.0]]'
    if bounds.startswith("staleness") and algorithm.level in ("sequence", "sequence_product"):
        yield (
            f'algorithm.bounds = "{bounds}" differs between tokens, and algorithm.level = "{algorithm.level}" keeps or '
            "drops whole sequences: set the level to token"
        )
    high = algorithm.correction_high
    if high is not None and algorithm.correction_low > high:
        yield (
            f"algorithm.correction_low = {algorithm.correction_low} is above algorithm.correction_high = {high}: "
            "nothing lies between them"
        )
