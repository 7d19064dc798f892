"""Settings that were changed and that nothing in this run reads."""

from __future__ import annotations

from typing import Any

from common.config import RunConfig
from common.config_load import valid_keys
from deploy.unused_algorithm import ALGORITHM_RULES, Rule


def settings_without_effect(config: RunConfig) -> list[str]:
    """A line for each setting that differs from its default without changing anything, with the reason."""
    defaults = RunConfig()
    return [
        f"{key} = {_value(config, key)!r} has no effect: {reason}"
        for prefix, reason, unused in RULES
        if unused(config)
        for key in valid_keys()
        if (key == prefix or key.startswith(prefix + ".")) and _value(config, key) != _value(defaults, key)
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
    ("evaluation", "evaluation.num_prompts is 0", lambda c: c.evaluation.num_prompts == 0),
    ("reward.processes", 'reward.function is "environment"', lambda c: c.reward.function == "environment"),
    ("reward.time_limit_s", 'reward.function is "environment"', lambda c: c.reward.function == "environment"),
)
