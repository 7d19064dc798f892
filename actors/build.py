"""The parts of a rollout actor from the run's config."""

from __future__ import annotations

from pathlib import Path

from actors.engine import EngineSettings, make_engine
from actors.environment import make_environment
from actors.formatting import load_formatter
from actors.reward import ENVIRONMENT_REWARD, RewardPool
from actors.rollout import RolloutWorker
from buffer.links import ActorLink
from common.config import RunConfig

CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}  # nats


def engine_settings(config: RunConfig, model_folder: Path) -> EngineSettings:
    """The engine's part of a config whose `auto` settings are decided."""
    engine, rollout = config.engine, config.rollout
    assert engine.kind != "auto"
    assert engine.device != "auto"
    assert config.weights.transport != "auto"
    return EngineSettings(
        model_path=str(model_folder),
        kind=engine.kind,
        device=engine.device,
        max_model_len=rollout.max_tokens,
        max_num_seqs=rollout.slots,
        dtype=config.model.dtype,
        kv_cache_bytes=engine.kv_cache_mib * 2**20 if engine.device == "cpu" else None,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        seed=config.seed,
        tensor_parallel_size=engine.tensor_parallel_size,
        enforce_eager=engine.enforce_eager,
        transport=config.weights.transport,
        weights_folder=config.weights.folder,
        canary_atol=config.weights.canary_tolerance or CANARY_TOLERANCE[config.model.dtype],
    )


def build_worker(actor_id: str, config: RunConfig, model_folder: Path, link: ActorLink) -> RolloutWorker:
    """A worker that is yet to be started.

    Raises:
        ConfigError: the environment is unknown or cannot be made, or the model has no chat template for chat prompts.
        ModelError: the model folder has no tokenizer.
    """
    reward = config.reward
    rewards = None
    if reward.function != ENVIRONMENT_REWARD:
        rewards = RewardPool(
            reward.function, config.import_dir, processes=reward.processes, time_limit_s=reward.time_limit_s
        )
    return RolloutWorker(
        actor_id=actor_id,
        engine=make_engine(engine_settings(config, model_folder)),
        environment=make_environment(config.environment, config.import_dir),
        rewards=rewards,
        formatter=load_formatter(model_folder, config.data),
        link=link,
        rollout=config.rollout,
        environment_config=config.environment,
        heartbeat_s=config.buffer.heartbeat_s,
        max_delay_s=config.evaluation.max_delay_s,
    )
