"""What a run would do, as text: where everything goes, what it takes, and what looks wrong. Nothing is started.

The data is read, and the reward function and environment are imported, so that their errors show here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from math import ceil

from actors.environment import make_environment
from actors.formatting import require_template
from actors.scoring import load_scorer
from buffer.build import replay_settings
from buffer.sources import load_rows
from common.algorithm_config import needs_starting_model, updates_per_batch
from common.config import RunConfig
from deploy.estimates import OTHER_BASE, Machine, Memory, ModelFacts, batch_tokens, estimate, kv_tokens, model_facts
from deploy.format import plural, size
from deploy.placement import CPUS, resolve_auto
from deploy.unused import settings_without_effect
from learner.recipes import RECIPES

Lines = Iterable[tuple[str, str]]

CHOICES: Mapping[tuple[str, object], str] = {
    ("advantage", "gae"): "learned value with generalised advantage estimation",
    ("advantage", "group_mean"): "reward minus the mean of its group",
    ("advantage", "group_mean_std"): "reward minus the mean of its group, over the group's deviation",
    ("advantage", "leave_one_out"): "reward minus the mean of the others in its group",
    ("advantage", "least_variance"): "reward minus its group's baseline of least gradient variance",
    ("advantage", "smoothed"): "standardised in its group and over all rewards of the prompt",
    ("advantage", "hybrid"): "the group's mean reward in a one-step advantage with a learned value",
    ("advantage", "return"): "discounted reward from each token on",
    ("advantage", "running_mean"): "reward minus the mean of the prompt's last rewards",
    ("advantage", "success_rate"): "reward minus the prompt's remembered success rate",
    ("advantage", "optimal_value"): "reward minus the prompt's optimal value, estimated beforehand",
    ("advantage", "implicit"): "the policy's own log ratio to the starting model",
    ("loss", "policy_gradient"): "policy gradient",
    ("loss", "implicit_value"): "value loss on the policy's own log ratios, and policy gradient",
    ("loss", "optimal_value"): "regression of the policy's log ratio on the advantage",
    ("value", "none"): "no value function",
    ("value", "own_model"): "a model of its own, begun from the policy",
    ("value", "policy_head"): "a head on the policy's trunk, which it does not train",
    ("reference", "behaviour"): "ratio to the log-probs that the engine recorded",
    ("reference", "proximal"): "ratio to log-probs that the learner recomputes before the update",
    ("reference", "interpolated"): "ratio to log-probs between the engine's and the current ones, by staleness",
    ("trust_region", "none"): "no limit on the ratio",
    ("trust_region", "truncate"): "capped ratios as constant weights",
    ("trust_region", "soft_gate"): "a smooth gate on the ratio",
    ("trust_region", "gamma_weight"): "a smooth weight on the sequence's ratio",
    ("trust_region", "probability_shift"): "tokens whose probability has moved too far have no gradient",
    ("trust_region", "clip"): "PPO's clip",
    ("trust_region", "mask"): "tokens whose ratio leaves the band have no gradient",
    ("aggregation", "token_mean"): "mean over all sampled tokens of the batch",
    ("aggregation", "sequence_mean"): "mean of the trajectories' means",
    ("aggregation", "sequence_sum"): "mean of the trajectories' sums",
    ("aggregation", "sum_of_means"): "sum of the trajectories' means",
    ("aggregation", "fixed_length"): "sum over a constant length",
    ("correction", "truncated"): "truncated ratio of proximal to behaviour policy",
    ("correction", "banded"): "ratio of proximal to behaviour policy, 0 outside a band",
    ("on_exceeded", "mask"): "too stale tokens have no gradient",
    ("on_exceeded", "drop"): "too stale trajectories are dropped, with their group",
    ("on_exceeded", "wait"): "batches wait so that nothing gets too stale",
}


NOT_SHOWN = {("loss", "policy_gradient"), ("correction", "none")}  # what most recipes have


def make_plan(config: RunConfig, machine: Machine | None = None, model: ModelFacts | None = None) -> str:
    """The plan of a run.

    Raises:
        SlipstreamError: the run could not start: no such model, no chat template in it, data that cannot be read, a
            reward that cannot be imported, more GPUs asked for than there are.
    """
    machine = machine or Machine.look(config)
    config = resolve_auto(config, machine.num_gpus)
    model = model or model_facts(config.model.path)
    require_template(config.data, model.has_chat_template)
    memory = estimate(config, model)
    sections: list[tuple[str, Lines]] = [
        ("Run", _run(config, model)),
        ("Algorithm", _algorithm(config)),
        ("Data", _data(config)),
        ("Batches", _batches(config, model)),
        (f"Services, on {_machine(machine)}", _services(config)),
        ("Memory, estimated", _memory(config, memory, machine)),
    ]
    text = "\n\n".join(f"{title}\n{_columns(lines)}" for title, lines in sections)
    found = warnings(config, model, memory, machine)
    text += "\n\nWarnings\n" + "\n".join(f"  - {line}" for line in found) if found else "\n\nNo warnings."
    return text + "\n\nNothing was started: this was a dry run."


def warnings(config: RunConfig, model: ModelFacts, memory: Memory, machine: Machine) -> list[str]:
    """What will not work, or not as it may be meant."""
    return [
        *settings_without_effect(config),
        *_memory_warnings(config, memory, machine),
        *_engine_warnings(config, model),
        *_layout_warnings(config, model, machine),
    ]


def total_memory(config: RunConfig, memory: Memory) -> int:
    """Main memory of all processes and of the publications."""
    total = OTHER_BASE + memory.buffer + memory.publications
    if config.learner.device == "cpu":
        total += sum(memory.learner.values())
    if config.engine.device == "cpu":
        total += config.rollout.num_actors * sum(memory.engine.values())
    return total


# Sections


def _run(config: RunConfig, model: ModelFacts) -> Lines:
    recipe, layers = RECIPES[config.recipe], config.learner.trainable_layers
    yield "recipe", f"{recipe.name}: {recipe.summary}"
    sizes = f"{model.num_parameters:,} parameters, {plural(model.num_layers, 'layer')}"
    yield "model", f"{model.name}: {sizes}, served as {config.model.dtype}"
    if model.note:
        yield "", model.note
    which = f"of the last {plural(layers, 'layer')}" if layers else "(all)"
    yield "trained", f"{model.num_trained(layers):,} parameters {which}"
    epochs = f", or {plural(config.data.epochs, 'epoch')}" if config.data.epochs else ""
    yield "ends after", plural(config.max_updates, "update") + epochs
    yield "run directory", config.run_dir or "runs/<time>-<recipe>"


def _algorithm(config: RunConfig) -> Lines:
    algorithm, learner = config.algorithm, config.learner
    decay = algorithm.policy_lambda
    shown = f"1 - 1/({algorithm.lambda_alpha:g} · length)" if decay == "length_adaptive" else f"{decay:g}"
    details = {
        "gae": f" (γ {algorithm.gamma:g}, λ {shown} for the policy, {algorithm.value_lambda:g} for the value)",
        "clip": f" ({1 - algorithm.eps_low:g} to {1 + algorithm.eps_high:g})",
        "mask": f" ({1 - algorithm.eps_low:g} to {1 + algorithm.eps_high:g})",
    }
    for name in ("loss", "advantage", "value", "reference", "trust_region", "correction", "aggregation"):
        choice = getattr(algorithm, name)
        regression = algorithm.loss == "optimal_value" and name in ("reference", "trust_region", "aggregation")
        if (name, choice) in NOT_SHOWN or regression:
            continue
        yield name.replace("_", " "), f"{choice}: {CHOICES[name, choice]}{details.get(choice, '')}"
    updates = updates_per_batch(algorithm)
    if updates > 1:
        yield "a batch", f"{updates} updates: {algorithm.minibatches} minibatches, {plural(algorithm.epochs, 'time')}"
    if needs_starting_model(algorithm):
        yield "starting model", "a frozen copy beside the policy"
    bound = config.staleness.bound
    rule = CHOICES["on_exceeded", config.staleness.on_exceeded] if bound else "synchronous training"
    yield "staleness", f"at most {plural(bound, 'weight version')}: {rule}"
    warmup = f", rising over {plural(learner.warmup_updates, 'update')}" if learner.warmup_updates else ""
    yield "step size", f"{learner.learning_rate:g}, {learner.schedule}{warmup}"


def _data(config: RunConfig) -> Lines:
    load = partial(load_rows, config.data, seed=config.seed, evaluation=config.evaluation, import_dir=config.import_dir)
    train, held_out = load(split="train"), load(split="held_out")
    skipped = (f", {len(held_out):,} held out" if train.repeats else "") + train.left_out
    yield "source", f"{config.data.source}: {plural(len(train), 'prompt')} to train on{skipped}"
    batches = ceil(config.max_updates / updates_per_batch(config.algorithm))
    prompts = batches * config.buffer.batch_size // config.groups.size
    yield "", f"{config.max_updates} updates take {plural(prompts, 'prompt')}, {prompts / len(train):.3g} epochs"
    if len(held_out):
        every = config.evaluation.every_updates
        when = f"before, after and every {every} updates" if every else "before and after"
        yield "held out", f"{plural(len(held_out), 'prompt')}, evaluated {when}"
    make_environment(config.environment, config.import_dir)
    if config.reward.function != "environment":
        load_scorer(config.reward.function, config.import_dir)
    yield "environment", f"{config.environment.name}, {plural(config.environment.max_turns, 'turn')} at most"
    yield "reward", f"{config.reward.function}, {config.reward.time_limit_s:g} s at most"


def _batches(config: RunConfig, model: ModelFacts) -> Lines:
    settings, rollout = replay_settings(config), config.rollout
    single = settings.group_size == 1
    units = "single rollouts" if single else f"{settings.units_per_batch} groups of {settings.group_size}"
    yield "a batch", f"{plural(settings.batch_size, 'trajectory', 'trajectories')}, {units}"
    tokens = batch_tokens(config)
    micro = ceil(tokens / max(config.learner.micro_batch_tokens, rollout.max_tokens))
    yield "its tokens", f"at most {tokens:,}, in {plural(micro, 'micro-batch', 'micro-batches')}"
    limit = f"({settings.staleness_bound} + 1) · {settings.batch_size} = {settings.admission_limit:,}"
    yield "at once", f"at most {limit} trajectories from lease to training"
    slots = f"{rollout.num_actors} × {rollout.slots} = {rollout.num_actors * rollout.slots:,}"
    yield "generated", f"at most {slots} of them at the same time"
    if config.engine.device == "cpu":
        needed = rollout.slots * rollout.max_tokens
        yield "KV cache", f"{kv_tokens(config, model):,} tokens in each engine; its slots need at most {needed:,}"
    longest = f"{rollout.max_tokens:,} tokens, {size(settings.longest_trajectory_bytes)}"
    yield "a trajectory", f"at most {longest}; the buffer holds up to {size(settings.max_bytes)}"


def _services(config: RunConfig) -> Lines:
    engine, learner = config.engine, config.learner
    yield "driver", "1 process, this one"
    yield "buffer", f"1 process, {CPUS['buffer']} CPU"
    threads = f", {plural(learner.num_threads, 'thread')}" if learner.device == "cpu" else ""
    yield "learner", f"1 process, {_share('learner', learner.device, 1)}{threads}"
    count = 0 if config.reward.function == "environment" else config.reward.processes
    scoring = f", {plural(count, 'scoring process', 'scoring processes')} each" if count else ""
    share = _share("actor", engine.device, engine.tensor_parallel_size)
    yield "actors", f"{config.rollout.num_actors}, each {share}, {engine.kind.replace('_', '-')} engine{scoring}"
    yield "weights", f"through {config.weights.transport.replace('_', ' ')}"
    metrics = config.metrics
    yield "metrics", "not served" if metrics.port is None else f"at http://{metrics.host}:{metrics.port}/metrics"


def _memory(config: RunConfig, memory: Memory, machine: Machine) -> Lines:
    yield "learner", _sum(memory.learner, config.learner.device)
    engine = _sum(memory.engine, config.engine.device)
    if config.engine.device == "cuda":
        engine += f", the KV cache takes the rest of {config.engine.gpu_memory_utilization:.0%} of each GPU"
    yield "each actor", engine
    yield "buffer", f"{size(memory.buffer)} at most"
    free = "which does not exist" if machine.folder_free is None else f"{size(machine.folder_free)} free"
    yield "publications", f"{size(memory.publications)} in {config.weights.folder}, {free}"
    yield "all together", f"{size(total_memory(config, memory))} of main memory, {size(machine.memory)} free"


# Warnings


def _memory_warnings(config: RunConfig, memory: Memory, machine: Machine) -> Iterable[str]:
    total = total_memory(config, memory)
    if total > machine.memory:
        yield (
            f"about {size(total)} of memory are needed and {size(machine.memory)} are free: lower rollout.num_actors, "
            "engine.kv_cache_mib or learner.micro_batch_tokens, or set learner.trainable_layers"
        )
    if machine.folder_free is None:
        yield f"weights.folder = {config.weights.folder!r} does not exist: make it, or set another folder in memory"
    elif memory.publications > machine.folder_free:
        yield (
            f"weights.folder = {config.weights.folder!r} has {size(machine.folder_free)} free and publications take "
            f"{size(memory.publications)}: free some, raise its limit (docker run --shm-size), or set another folder"
        )


def _engine_warnings(config: RunConfig, model: ModelFacts) -> Iterable[str]:
    rollout = config.rollout
    if config.engine.device == "cpu":
        room = kv_tokens(config, model)
        if room < rollout.max_tokens:
            yield (
                f"the KV cache holds {room:,} tokens, less than one trajectory of rollout.max_tokens = "
                f"{rollout.max_tokens:,}: raise engine.kv_cache_mib"
            )
        elif room < rollout.slots * rollout.max_tokens:
            yield (
                f"the KV cache holds {room // rollout.max_tokens} trajectories of the greatest length, for "
                f"{rollout.slots} slots: long ones wait; raise engine.kv_cache_mib or lower rollout.slots"
            )
    limit = replay_settings(config).admission_limit
    slots = rollout.num_actors * rollout.slots
    if slots > limit:
        yield (
            f"{slots - limit} of {slots} generation slots can never be used: at most (staleness.bound + 1) · "
            f"buffer.batch_size = {limit} trajectories are live; lower rollout.slots"
        )
    if rollout.max_prompt_tokens + rollout.max_new_tokens > rollout.max_tokens:
        yield (
            f"a prompt of rollout.max_prompt_tokens = {rollout.max_prompt_tokens} leaves less than "
            f"rollout.max_new_tokens = {rollout.max_new_tokens} of rollout.max_tokens = {rollout.max_tokens}: "
            "its response is cut short"
        )


def _layout_warnings(config: RunConfig, model: ModelFacts, machine: Machine) -> Iterable[str]:
    learner = config.learner
    if learner.micro_batch_tokens < config.rollout.max_tokens:
        yield (
            f"learner.micro_batch_tokens = {learner.micro_batch_tokens} is less than rollout.max_tokens = "
            f"{config.rollout.max_tokens}: a longer trajectory is a micro-batch of its own"
        )
    if learner.trainable_layers is not None and learner.trainable_layers > model.num_layers:
        yield (
            f"learner.trainable_layers = {learner.trainable_layers}, and the model has {model.num_layers} layers: "
            "the run will fail"
        )
    wanted = CPUS["buffer"] + CPUS["learner" if learner.device == "cpu" else "learner on GPU"]
    wanted += config.rollout.num_actors * CPUS["actor" if config.engine.device == "cpu" else "actor on GPU"]
    if wanted > machine.num_cpus:
        yield (
            f"the services ask Ray for {wanted:g} CPUs and there are {machine.num_cpus}: some would wait for ever; "
            "lower rollout.num_actors"
        )


# Text


def _share(service: str, device: str, gpus: int) -> str:
    if device == "cpu":
        return f"{CPUS[service]} CPU"
    return f"{CPUS[f'{service} on GPU']} CPU and {plural(gpus, 'GPU')}"


def _machine(machine: Machine) -> str:
    return f"{plural(machine.num_cpus, 'CPU')} and {plural(machine.num_gpus, 'GPU') if machine.num_gpus else 'no GPU'}"


def _sum(parts: Mapping[str, int], device: str) -> str:
    terms = " + ".join(f"{name} {size(number)}" for name, number in parts.items())
    return f"{size(sum(parts.values()))} on {device} = {terms}"


def _columns(lines: Lines) -> str:
    return "\n".join(f"  {name:<14} {text}" for name, text in lines)
