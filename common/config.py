"""All settings of a run, as frozen pydantic models: one class a TOML table.

A value comes from, in rising order of precedence: the defaults here, the recipe's row, the TOML file, the command line
(`common/config_load.py` merges them). `[algorithm]` and
`[value]` are in `common/algorithm_config.py`. Nothing here imports torch, ray or vllm.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from common.algorithm_config import AlgorithmConfig, ValueConfig, impossible_algorithms, is_unbounded
from common.table import Table

Device = Literal["auto", "cpu", "cuda"]


class ModelConfig(Table):
    """`[model]`: the starting model, weight version 0."""

    path: str = "builtin:tiny-sort"
    """A local folder in the transformers format, `builtin:tiny-sort`, or `package:smollm2`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the served and published weights. The learner keeps float32 master weights either way."""


class DataConfig(Table):
    """`[data]`: where prompts come from."""

    source: str = "task:sort-digits"
    """`task:NAME`, `reasoning-gym:NAME`, a .jsonl or .parquet file, or `python:MODULE:FUNCTION` returning rows."""

    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages with `role` and `content`."""

    answer_column: str = "answer"
    """Column with the reference answer; may be absent when the reward does not need one."""

    chat: Literal["auto", "always", "never"] = "auto"
    """Whether a text prompt is wrapped as a user message in the model's chat template; auto: if the model has one."""

    system_prompt: str = ""
    """System message put before a text prompt that is wrapped as chat."""

    epochs: int | None = Field(None, ge=1)
    """Passes over the data; none: until `max_updates`."""

    num_rows: int = Field(2000, ge=1)
    """Rows made by `task:` and `reasoning-gym:` sources that can make any number."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the source, e.g. `max_digits = 1` for a reasoning-gym task."""

    on_bad_row: Literal["fail", "skip"] = "fail"
    """A malformed row ends the run naming file and line, or is counted and left out."""


class EnvironmentConfig(Table):
    """`[environment]`: what the model talks to."""

    name: str = "single-turn"
    """`single-turn`, `second-try`, or `MODULE:CLASS`."""

    max_turns: int = Field(1, ge=1)
    """Turns after which an episode is cut off."""

    step_time_limit_s: float = Field(30.0, gt=0)
    """A step that takes longer makes the trajectory unscorable."""


class RewardConfig(Table):
    """`[reward]`: how a finished rollout is scored, outside the engine's process."""

    function: str = "exact-match"
    """`exact-match`, `number-match`, `reasoning-gym`, `environment`, `MODULE:FUNCTION` of (response, answer, row)."""

    processes: int = Field(1, ge=1)
    """Scoring processes of one actor."""

    time_limit_s: float = Field(10.0, gt=0)
    """A call that takes longer is killed with its process; the sample is unscorable."""


class RolloutConfig(Table):
    """`[rollout]`: how actors generate."""

    num_actors: int = Field(2, ge=1)
    """Rollout actors, each with an engine of its own."""

    slots: int = Field(32, ge=1)
    """Trajectories that one actor generates at once; as many more may wait for their scores."""

    temperature: float = Field(1.0, gt=0, le=2)
    """Sampling temperature; the learner divides its logits by the same. Above 0: greedy tokens cannot be trained on."""

    max_new_tokens: int = Field(16, ge=1)
    """Sampled tokens of one turn at most."""

    max_prompt_tokens: int = Field(64, ge=1)
    """Longer prompts are dropped as over-long, and counted."""

    max_tokens: int = Field(128, ge=4)
    """Tokens of a trajectory at most, prompt, turns and observations together; one that runs out is truncated."""


class EngineConfig(Table):
    """`[engine]`: vLLM."""

    kind: Literal["auto", "in_process", "async"] = "auto"
    """vLLM's engine stepped in the actor's process (auto on CPU), or its asynchronous engine (auto on GPUs)."""

    device: Device = "auto"
    """Where the engine runs."""

    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one engine."""

    kv_cache_mib: int = Field(128, ge=16)
    """Memory of one engine's KV cache on CPU."""

    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory that one engine may take."""

    enforce_eager: bool = True
    """Skip vLLM's graph compilation: a fast start. Set false for long runs on GPUs."""


class GroupsConfig(Table):
    """`[groups]`: trajectories of one prompt that a recipe needs together."""

    size: int = Field(1, ge=1)
    """Members of a group; 1: single rollouts."""

    straggler: Literal["retry", "close", "convert"] = "retry"
    """A late member is tried again, closed off, or the group is trained as single rollouts (needs a value model)."""

    straggler_after_s: float = Field(300.0, gt=0)
    """Seconds after the first member's delivery that make the missing ones late."""

    max_uninformative_batches: int = Field(20, ge=0)
    """Batches in a row in whose groups all rewards are equal, after which the run ends: nothing is left to learn. It
    fails if no group's rewards ever differed. 0: never."""

    close_at: int | None = Field(None, ge=2)
    """Delivered members that are enough to close a group; needed for `close` and `convert`."""


class StalenessConfig(Table):
    """`[staleness]`: how far the learner may be ahead of the tokens it trains on."""

    bound: int = Field(4, ge=0)
    """Largest staleness that is trained on, in weight versions. 0 = synchronous."""

    on_exceeded: Literal["mask", "drop", "wait"] = "mask"
    """Too stale tokens leave the policy loss, or their unit is dropped, or batches wait so that none gets too stale."""


class BufferConfig(Table):
    """`[buffer]`: batches, leases and limits."""

    batch_size: int = Field(64, ge=1)
    """Trajectories of one batch; a multiple of the group size."""

    max_mib: int = Field(1024, ge=1)
    """Held trajectories at most; at the limit nothing new is leased."""

    max_attempts: int = Field(3, ge=1)
    """Tries of a sample that fails before it is dropped."""

    lease_deadline_s: float = Field(600.0, gt=0)
    """A trajectory that is not delivered within this is given to another actor."""

    heartbeat_s: float = Field(30.0, gt=0)
    """An actor that is silent for this long loses its leases."""

    max_no_update_in_a_row: int = Field(5, ge=1)
    """Batches without an update after which the run fails."""


class LearnerConfig(Table):
    """`[learner]`: optimizer, memory and layout."""

    device: Device = "auto"
    """Where the learner runs."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak step size of the policy."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay to 0 at `max_updates`, or none."""

    warmup_updates: int = Field(0, ge=0)
    """Updates over which the step size rises to its peak; the first is already above 0."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""

    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW's pull of the weights towards 0, in step sizes."""

    max_grad_norm: float = Field(1.0, gt=0)
    """A longer gradient is scaled down to this length."""

    trainable_layers: int | None = Field(None, ge=1)
    """Train only the last layers of the policy; none: every parameter."""

    micro_batch_tokens: int = Field(4096, ge=1)
    """Token budget of a micro-batch; a longer single trajectory is a micro-batch of its own."""

    layout: Literal["auto", "rows", "packed"] = "auto"
    """Rows of similar length padded to the longest, or one packed row with variable-length attention (auto on GPUs)."""

    logprob_chunk_tokens: int = Field(2048, ge=1)
    """Positions whose logits over the vocabulary are held at once."""

    num_threads: int = Field(1, ge=1)
    """CPU threads of torch."""


class EvaluationConfig(Table):
    """`[evaluation]`: held-out prompts, beside training."""

    every_updates: int = Field(20, ge=0)
    """Updates between evaluations; 0: only before and after."""

    num_prompts: int = Field(128, ge=0)
    """Held-out prompts; 0: no evaluation."""

    temperature: float = Field(0.0, ge=0, le=2)
    """0: greedy."""

    source: str = ""
    """A data source of its own; empty: a part of `[data]` that is not trained on."""

    max_delay_s: float = Field(60.0, gt=0)
    """An actor that evaluates puts off loading new weights for this long at most."""


class CheckpointConfig(Table):
    """`[checkpoint]`: what a run can be resumed from."""

    every_updates: int = Field(20, ge=0)
    """Batches between checkpoints, those without an update included; 0: only at the end."""

    keep: int = Field(2, ge=1)
    """Newest complete checkpoints that stay."""


class WeightsConfig(Table):
    """`[weights]`: publication of new weights to the engines."""

    transport: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto"
    """auto: shared memory, whatever the devices. nccl and ipc are refused: the learner cannot send through them yet."""

    canary_tolerance: float | None = Field(None, gt=0)
    """Largest difference of log-probs between learner and engine after a load, in nats. None: 1e-4 in float32; 0.5 in
    bfloat16, where it shows that the weights are the learner's but not every bit of them (the checksum does that)."""

    folder: str = "/dev/shm"
    """Where publications are written on the learner's node."""


class SupervisionConfig(Table):
    """`[supervision]`: what happens when a service dies."""

    max_restarts: int = Field(3, ge=0)
    """Replacements of one actor, or of the learner, before the run fails."""

    restart_backoff_s: float = Field(1.0, ge=0)
    """Pause before the first replacement; doubles with each."""

    start_time_limit_s: float = Field(600.0, gt=0)
    """A service that is not ready within this fails the run."""

    stall_limit_s: float = Field(900.0, gt=0)
    """Without a finished batch for this long the run fails, saying what it waits for."""


class MetricsConfig(Table):
    """`[metrics]`: what the driver shows to Prometheus; see docs/prometheus.md."""

    port: int | None = Field(9464, ge=0, le=65535)
    """Where it listens, or the next free port if it is taken; 0: any free port; none: nowhere."""

    host: str = "127.0.0.1"
    """Address it listens on; 0.0.0.0: every one of this machine, for a Prometheus elsewhere."""


class RayConfig(Table):
    """`[ray]`: the cluster that the services run on."""

    address: str = ""
    """A running cluster (`auto` inside a Ray job); empty: Ray starts in this process, or RAY_ADDRESS if that is set."""


class RunConfig(Table):
    """Everything. `slipstream train --config FILE table.key=value …`."""

    recipe: str = "sao"
    """Name of the algorithm; `slipstream recipes` lists them."""

    seed: int = Field(0, ge=0)
    """Decides prompt order, sampling seeds and initial value head."""

    max_updates: int = Field(100, ge=1)
    """Completed updates after which the run ends."""

    run_dir: str = ""
    """Where everything is written; empty: runs/<time>-<recipe>."""

    import_dir: str = ""
    """Folder that MODULE:NAME settings are imported from; empty: the folder the command was started in."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    groups: GroupsConfig = GroupsConfig()
    staleness: StalenessConfig = StalenessConfig()
    buffer: BufferConfig = BufferConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    value: ValueConfig = ValueConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    metrics: MetricsConfig = MetricsConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def refuse_impossible(self) -> RunConfig:
        for problem in impossible_combinations(self):
            raise ValueError(problem)
        return self


def impossible_combinations(config: RunConfig) -> list[str]:
    """Settings that cannot work together, each with the reason and the remedy."""
    algorithm, groups, rollout = config.algorithm, config.groups, config.rollout
    problems = []
    if config.buffer.batch_size % groups.size:
        problems.append(
            f"buffer.batch_size = {config.buffer.batch_size} is not a multiple of groups.size = {groups.size}: "
            "a batch is made of whole groups"
        )
    problems += impossible_algorithms(algorithm, config.value, groups.size)
    if config.staleness.bound > 0 and is_unbounded(algorithm):
        problems.append(
            f'algorithm.trust_region = "none" with staleness.bound = {config.staleness.bound} trains on stale tokens '
            "without any correction: take clip or mask, or set staleness.bound = 0"
        )
    if groups.straggler != "retry" and (groups.size < 2 or groups.close_at is None or groups.close_at > groups.size):
        problems.append(
            f'groups.straggler = "{groups.straggler}" needs groups.close_at between 2 and groups.size = {groups.size}'
        )
    if groups.straggler == "convert" and algorithm.value == "none":
        problems.append('groups.straggler = "convert" trains members as single rollouts, which needs a value model')
    if rollout.max_tokens <= rollout.max_prompt_tokens:
        problems.append(
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a response after "
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
        )
    if config.reward.function == "environment" and config.environment.name == "single-turn":
        problems.append(
            'reward.function = "environment" leaves scoring to the environment, and single-turn gives no reward: '
            "name a reward function, or another environment"
        )
    if config.reward.function == "reasoning-gym" and not config.data.source.startswith("reasoning-gym:"):
        problems.append(
            f'reward.function = "reasoning-gym" scores rows of data.source = "reasoning-gym:NAME", not of '
            f"{config.data.source!r}"
        )
    if config.environment.name == "single-turn" and config.environment.max_turns != 1:
        problems.append(
            f"environment.max_turns = {config.environment.max_turns} has no effect on single-turn: set it to 1"
        )
    return problems
