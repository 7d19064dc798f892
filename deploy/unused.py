"""Settings that were changed and that nothing in this run reads."""

from __future__ import annotations

from typing import Any

from common.algorithm_config import sees_staleness, updates_per_batch
from common.config import EvaluationConfig, RunConfig
from common.config_load import valid_keys
from deploy.unused_algorithm import ALGORITHM_RULES, Rule


def settings_without_effect(config: RunConfig) -> list[str]:
    """A line for each setting that does not change anything, with the reason: those that differ from their default,
    and a trust region that leaves stale tokens uncorrected."""
    defaults = RunConfig()
    lines = [
        f"{key} = {_value(config, key)!r} has no effect: {reason}"
        for prefix, reason, unused in RULES
        if unused(config)
        for key in valid_keys()
        if (key == prefix or key.startswith(prefix + ".")) and _value(config, key) != _value(defaults, key)
    ]
    return lines + uncorrected_staleness(config)


def uncorrected_staleness(config: RunConfig) -> list[str]:
    """A line if stale tokens are trained on as if they were fresh, though a trust region is set.

    The ratio to the policy before the updates on a batch is 1 on every token of the first of them, however old it is.
    """
    algorithm, bound = config.algorithm, config.staleness.bound
    if sees_staleness(algorithm) or algorithm.trust_region == "none" or not bound:
        return []
    remedy = (
        f"tokens up to {bound} versions stale (staleness.bound) are trained on without any correction. Set "
        "algorithm.reference = 'behaviour', as recipe grpo-dis does, an algorithm.correction, as tis does, or "
        "staleness.bound = 0"
    )
    if updates_per_batch(algorithm) > 1:
        return [f"algorithm.reference = 'proximal' sees what the updates on a batch change and not its age: {remedy}"]
    return [
        f"algorithm.trust_region = {algorithm.trust_region!r} has no effect: with algorithm.reference = 'proximal' and "
        f"one update a batch every ratio is 1, so that {remedy}"
    ]


def _value(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def _on_gpu(config: RunConfig) -> bool:
    return config.engine.device == "cuda"


def _on_cpu(config: RunConfig) -> bool:
    return config.engine.device == "cpu"


def _is_made(config: RunConfig) -> bool:
    return config.data.source.startswith(("task:", "reasoning-gym:"))


def _has_options(config: RunConfig) -> bool:
    return config.data.source.startswith(("reasoning-gym:", "python:"))


# `auto` devices are decided before this is asked.
RULES: tuple[Rule, ...] = (
    *ALGORITHM_RULES,
    ("groups.straggler", "groups.size is 1", lambda c: c.groups.size == 1),
    ("groups.straggler_after_s", "groups.size is 1", lambda c: c.groups.size == 1),
    (
        "groups.close_at",
        'groups.straggler is "retry", or groups.size is 1',
        lambda c: c.groups.size == 1 or c.groups.straggler == "retry",
    ),
    ("staleness.on_exceeded", "staleness.bound is 0: no token is stale", lambda c: c.staleness.bound == 0),
    ("engine.kv_cache_mib", "the engine runs on a GPU and takes engine.gpu_memory_utilization", _on_gpu),
    ("engine.gpu_memory_utilization", "the engine runs on the CPU and takes engine.kv_cache_mib", _on_cpu),
    ("engine.tensor_parallel_size", "the engine runs on the CPU", _on_cpu),
    ("learner.num_threads", "the learner runs on a GPU", lambda c: c.learner.device == "cuda"),
    ("data.num_rows", "only task: and reasoning-gym: sources are made to order", lambda c: not _is_made(c)),
    ("data.options", "only reasoning-gym: and python: sources take options", lambda c: not _has_options(c)),
    ("data.prompt_column", "the source has columns of its own", _is_made),
    ("data.answer_column", "the source has columns of its own", _is_made),
    ("data.system_prompt", 'data.chat is "never"', lambda c: c.data.chat == "never"),
    *(
        (f"evaluation.{name}", "evaluation.num_prompts is 0", lambda c: c.evaluation.num_prompts == 0)
        for name in EvaluationConfig.model_fields
        if name != "num_prompts"
    ),
    ("reward.processes", 'reward.function is "environment"', lambda c: c.reward.function == "environment"),
    ("reward.time_limit_s", 'reward.function is "environment"', lambda c: c.reward.function == "environment"),
)
