"""Largest difference between the log-probs that the engine records and the learner's, of the same tokens.

Both hold the same weights in float32, so whatever differs is arithmetic: the engine computes token by token with a KV
cache, the learner whole trajectories in rows. The ratio of an unchanged policy is exp of this difference, so it has to
be next to nothing; the exit status says whether it is within the limit.

    python -m benchmarks.logprob_agreement
    python -m benchmarks.logprob_agreement --models quickstart random smollm2    # after `make smollm2`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from actors.build import engine_settings
from actors.engine import Engine, Generation, GenerationRequest, engine_environment, make_engine
from actors.formatting import load_formatter
from benchmarks.models import endless_model
from benchmarks.results import save, show
from buffer.prompts import PromptSource
from buffer.sources import load_rows
from common.config import RunConfig
from common.config_load import load_config
from common.types import GroupId, LeaseId, SampleId, Trajectory, Turn
from deploy.placement import resolve_auto
from learner.model_cache import default_cache_dir
from learner.models import resolve_model
from learner.recipes import recipe_settings

CONFIGS = Path(__file__).parent.parent / "deploy" / "configs"
TEMPERATURES = (0.7, 1.0, 1.3)
LIMIT = 1e-4  # nats


def _prepared(config: RunConfig, folder: Path) -> Path:
    return resolve_model(config.model.path, seed=config.seed, cache_dir=default_cache_dir(), report=print)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what it is asked."""

    config: str
    model: Callable[[RunConfig, Path], Path] = _prepared
    settings: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "quickstart": Case(config="quickstart.toml"),
    "random": Case(
        config="quickstart.toml",
        model=lambda config, folder: endless_model(folder),
        settings=("rollout.max_new_tokens=96", "rollout.max_tokens=112"),
    ),
    "smollm2": Case(config="smollm2-sums.toml"),
}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences of log-probs, in nats."""

    model: str
    temperature: float
    tokens: int
    largest: float
    mean: float


def measure(name: str, samples: int, folder: Path) -> list[Agreement]:
    """One model at every temperature. The engine runs in this process."""
    case = CASES[name]
    config = resolve_auto(load_config(CONFIGS / case.config, case.settings, recipes=recipe_settings()), num_gpus=0)
    model = case.model(config, folder)
    settings = engine_settings(config, model)
    os.environ.update(engine_environment(settings))
    sampled = asyncio.run(_sample(config, model, make_engine(settings), samples))
    return [_compare(name, config, model, temperature, found) for temperature, found in sampled.items()]


async def _sample(config: RunConfig, model: Path, engine: Engine, samples: int) -> dict[float, list[Trajectory]]:
    formatter = load_formatter(model, config.data)
    rows = load_rows(config.data, seed=config.seed, split="train", evaluation=config.evaluation)
    source = PromptSource(rows, seed=config.seed)

    async def one(number: int, temperature: float) -> Trajectory:
        prompt = source.next()
        assert prompt is not None
        request = GenerationRequest(
            request_id=f"{number} at {temperature}",
            prompt_ids=formatter.prompt_ids(prompt),
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            seed=number,
            stop_token_ids=formatter.stop_token_ids,
        )
        return _trajectory(number, request, await engine.generate(request))

    await engine.start()
    try:
        return {
            temperature: list(await asyncio.gather(*(one(number, temperature) for number in range(samples))))
            for temperature in TEMPERATURES
        }
    finally:
        await engine.close()


def _trajectory(number: int, request: GenerationRequest, generation: Generation) -> Trajectory:
    start, new = len(request.prompt_ids), len(generation.token_ids)
    return Trajectory(
        sample_id=SampleId(number),
        lease_id=LeaseId(number),
        group_id=GroupId(number),
        prompt_id="",
        epoch=0,
        attempt=0,
        token_ids=np.concatenate([np.asarray(request.prompt_ids, np.int32), generation.token_ids]),
        loss_mask=np.arange(start + new) >= start,
        rollout_logprobs=np.concatenate([np.zeros(start, np.float32), generation.logprobs]),
        weight_versions=np.concatenate([np.full(start, -1, np.int32), generation.weight_versions]),
        turns=(Turn(start=start, stop=start + new, finish_reason=generation.finish_reason),),
        temperature=request.temperature,
        reward=0.0,
        finish_reason=generation.finish_reason,
    )


def _compare(
    name: str, config: RunConfig, model: Path, temperature: float, trajectories: Sequence[Trajectory]
) -> Agreement:
    import torch

    from learner.batching import flatten, micro_batches
    from learner.policy import Policy
    from learner.trunk import Compute
    from learner.update import choose_layout

    compute = Compute(torch.device("cpu"), torch.float32)
    layout, chunk = choose_layout(config, compute.device), config.learner.logprob_chunk_tokens
    policy = Policy(model, compute, trainable_layers=None, logprob_chunk_tokens=chunk, layout=layout)
    batch = flatten([t for t in trajectories if t.num_sampled], read_final_state=False)
    logprobs = torch.zeros_like(batch.rollout_logprobs)
    with torch.no_grad():
        for micro in micro_batches(batch, budget=config.learner.micro_batch_tokens, layout=layout):
            logprobs[micro.tokens] = policy.scores(micro, batch).logprobs
    differences = (logprobs - batch.rollout_logprobs).abs()
    return Agreement(
        model=name,
        temperature=temperature,
        tokens=batch.num_tokens,
        largest=float(differences.max()),
        mean=float(differences.mean()),
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=["quickstart", "random"])
    parser.add_argument("--samples", type=int, default=256, help="trajectories for each temperature")
    parser.add_argument("--smoke", action="store_true", help="a few samples, nothing is written")
    options = parser.parse_args(words)
    found: list[Agreement] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            found += measure(name, 8 if options.smoke else options.samples, Path(folder))
    show(
        f"log-probs of engine and learner, float32; allowed {LIMIT:g}",
        [
            {
                "model": row.model,
                "temperature": f"{row.temperature:g}",
                "tokens": f"{row.tokens:,}",
                "largest difference": f"{row.largest:.1e}",
                "mean": f"{row.mean:.1e}",
            }
            for row in found
        ],
    )
    if not options.smoke:
        print(f"written to {save('logprob_agreement', {'limit': LIMIT, 'rows': [asdict(row) for row in found]})}")
    return int(any(not row.largest <= LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
