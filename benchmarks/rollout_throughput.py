"""Tokens per second of a rollout actor, with all that is around its engine, against the bare engine.

The actor path is the real one: leases from a replay buffer over Ray, episodes, scoring in a process of its own,
deliveries as messages, the archive. Instead of a learner there is one that ends each batch at once. The bare engine is
vLLM's, built from the same settings in a process of its own, stepped in a plain loop and given the same prompts; a
new request is added as soon as one ends.

The unit of work is a round of a fixed number of samples, from a standstill until the last has arrived. Rounds of the
two take turns, so that other work on the machine hits both, and each is compared with its neighbour. CPU time is shown
too: it depends least on what else the machine does, as does the best round of each.

    python -m benchmarks.rollout_throughput
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.build import engine_settings
from actors.engine import EngineSettings, GenerationRequest, engine_environment
from actors.formatting import load_formatter
from benchmarks.models import endless_model
from benchmarks.results import save, show
from buffer.prompts import PromptSource
from buffer.sources import load_rows
from common.config import RunConfig
from common.config_load import load_config
from common.types import BatchOutcome
from common.weights import Canary, WeightManifest
from deploy.placement import CPUS, resolve_auto
from deploy.services import Services, ray_session
from learner.model_cache import default_cache_dir
from learner.models import resolve_model
from learner.recipes import recipe_settings

QUICKSTART = Path(__file__).parent.parent / "deploy" / "configs" / "quickstart.toml"
ROUND_LIMIT_S = 600.0
START_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is generated."""

    name: str
    samples: int  # of one round
    never_stops: bool  # a random model without a stop token, so that every response has the full length
    settings: tuple[str, ...] = ()  # on top of the quick start's


def _of_length(tokens: int, samples: int) -> Scenario:
    settings = (f"rollout.max_new_tokens={tokens}", f"rollout.max_tokens={tokens + 16}")
    return Scenario(name=f"{tokens} tokens", samples=samples, never_stops=True, settings=settings)


SCENARIOS = (
    Scenario(name="quick start", samples=1024, never_stops=False),
    _of_length(32, samples=768),
    _of_length(128, samples=320),
)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one of the two."""

    tokens: int  # sampled
    seconds: float
    cpu_seconds: float  # of the process with the engine, its other threads and scoring processes included

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_1000_tokens(self) -> float:
        return 1e6 * self.cpu_seconds / self.tokens


class BareEngine:
    """vLLM and a loop. A Ray actor, so that it lives under the same environment variables."""

    def __init__(self, settings: EngineSettings, prompts: Sequence[list[int]], rollout: Any, stops: Any) -> None:
        self._settings, self._rollout, self._stops = settings, rollout, stops
        self._prompts = itertools.cycle(prompts)
        self._numbers = itertools.count()

    def start(self) -> int:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        from actors.engine_setup import engine_arguments, import_vllm

        import_vllm(self._settings)
        config = EngineArgs(**engine_arguments(self._settings), async_scheduling=False).create_engine_config()
        self._llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        gc.freeze()
        return os.getpid()

    def round(self, samples: int, seeded: bool = True) -> Round:
        began, cpu_began = time.perf_counter(), time.process_time()
        left, tokens = samples, 0
        while left or self._llm.has_unfinished_requests():
            while left and self._llm.get_num_unfinished_requests() < self._rollout.slots:
                self._add(seeded)
                left -= 1
            for output in self._llm.step():
                tokens += len(output.outputs[0].token_ids) if output.finished else 0
        return Round(tokens=tokens, seconds=time.perf_counter() - began, cpu_seconds=time.process_time() - cpu_began)

    def _add(self, seeded: bool) -> None:
        from vllm.inputs.engine import tokens_input

        from actors.engine_vllm import sampling_params

        number, prompt_ids = next(self._numbers), next(self._prompts)
        params = sampling_params(
            GenerationRequest(
                request_id=str(number),
                prompt_ids=prompt_ids,
                max_new_tokens=self._rollout.max_new_tokens,
                temperature=self._rollout.temperature,
                seed=number,
                stop_token_ids=self._stops,
            )
        )
        if not seeded:
            params.seed = None
        self._llm.add_request(str(number), tokens_input(prompt_ids), params)


class ActorPath:
    """A buffer and one rollout actor. With a staleness bound of 0 a round is a batch: nothing is leased beyond it."""

    def __init__(self, services: Services) -> None:
        self._buffer = services.start_buffer(None)
        ray.get(self._buffer.start.remote(), timeout=START_LIMIT_S)
        self._actor = services.start_actor("actor-0")
        self._open_batch: int | None = None

    def start(self) -> None:
        self._process = psutil.Process(ray.get(self._actor.start.remote(), timeout=START_LIMIT_S))
        nothing = Canary(token_ids=(), logprobs=())
        start = WeightManifest(version=0, path="", size_bytes=0, digest="", tensors=(), canary=nothing)
        ray.get(self._buffer.announce.remote(start))  # leases are given once there are weights; no engine loads it
        self._running = self._actor.run.remote()
        self._take()

    def round(self) -> Round:
        cpu_began, sampled = self._cpu_seconds(), self._sampled()
        began = time.perf_counter()
        # This outcome leaves the weight version as it is: nothing is published or loaded.
        ray.get(self._buffer.finish.remote(self._open_batch, BatchOutcome.VALUE_WARMUP, 0))
        self._take()
        seconds = time.perf_counter() - began
        return Round(tokens=self._sampled() - sampled, seconds=seconds, cpu_seconds=self._cpu_seconds() - cpu_began)

    def _take(self) -> None:
        ready, _ = ray.wait([self._buffer.take_batch.remote(ROUND_LIMIT_S), self._running], timeout=ROUND_LIMIT_S)
        answer = ray.get(ready[0]) if ready else None
        if answer is None:
            raise RuntimeError("the actor has not delivered a round")
        self._open_batch = answer[0]["batch_id"]

    def _sampled(self) -> int:
        return int(ray.get(self._actor.status.remote()).tokens_sampled)

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in (self._process, *self._process.children(recursive=True))]
        return float(sum(spent.user + spent.system for spent in times))


def measure(scenario: Scenario, repetitions: int, folder: Path) -> dict[str, list[Round]]:
    """Rounds of the actor path, of the bare engine, and of the bare engine without seeds, one after the other."""
    settings = (f"buffer.batch_size={scenario.samples}", "staleness.bound=0", "rollout.num_actors=1")
    config = load_config(QUICKSTART, (*settings, *scenario.settings), recipes=recipe_settings())
    model = endless_model(folder / "model") if scenario.never_stops else prepared_model(config)
    run_dir = folder / "run"
    run_dir.mkdir()
    rounds: dict[str, list[Round]] = {"actor": [], "bare": [], "bare, unseeded": []}
    with ray_session(config):
        config = resolve_auto(config, 0)
        services = Services(config, model, run_dir)
        try:
            bare, path = start_bare(config, model), ActorPath(services)
            ray.get(bare.start.remote(), timeout=START_LIMIT_S)
            path.start()
            for repetition in range(repetitions + 1):
                found = {
                    "actor": path.round(),
                    "bare": ray.get(bare.round.remote(scenario.samples)),
                    "bare, unseeded": ray.get(bare.round.remote(scenario.samples, seeded=False)),
                }
                for name in rounds if repetition else ():  # the first warms up
                    rounds[name].append(found[name])
        finally:
            services.end_all()
    return rounds


def start_bare(config: RunConfig, model: Path) -> Any:
    """The actor with the bare engine, not started yet."""
    settings, formatter = engine_settings(config, model), load_formatter(model, config.data)
    rows = load_rows(config.data, seed=config.seed, split="train", evaluation=config.evaluation)
    source = PromptSource(rows, seed=config.seed, epochs=1)
    prompts = [formatter.prompt_ids(prompt) for prompt in iter(source.next, None)]
    environment = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **engine_environment(settings)}
    remote = ray.remote(num_cpus=CPUS["actor"])(BareEngine).options(runtime_env={"env_vars": environment})
    return remote.remote(settings, prompts, config.rollout, formatter.stop_token_ids)


def prepared_model(config: RunConfig) -> Path:
    return resolve_model(config.model.path, seed=config.seed, cache_dir=default_cache_dir(), report=print)


def summary(scenario: Scenario, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Medians; ratios are taken between neighbours in time."""
    ratios = [
        actor.tokens_per_s / bare.tokens_per_s for actor, bare in zip(rounds["actor"], rounds["bare"], strict=True)
    ]
    return {
        "scenario": asdict(scenario),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_s": {name: statistics.median(r.tokens_per_s for r in found) for name, found in rounds.items()},
        "best_tokens_per_s": {name: max(r.tokens_per_s for r in found) for name, found in rounds.items()},
        "cpu_ms_per_1000_tokens": {
            name: statistics.median(r.cpu_ms_per_1000_tokens for r in found) for name, found in rounds.items()
        },
        "response_tokens": rounds["actor"][0].tokens / scenario.samples,
        "rounds": {name: [asdict(r) for r in found] for name, found in rounds.items()},
    }


def rows(result: dict[str, Any]) -> list[dict[str, str]]:
    found = []
    for name, tokens_per_s in result["tokens_per_s"].items():
        ratios = result["ratios"] if name == "actor" else ()
        found.append(
            {
                f"{result['scenario']['name']}, {result['response_tokens']:.1f} tokens a response": name,
                "tokens/s": f"{tokens_per_s:,.0f}",
                "best": f"{result['best_tokens_per_s'][name]:,.0f}",
                "to bare": f"{result['ratio']:.3f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "",
                "CPU ms / 1000 tokens": f"{result['cpu_ms_per_1000_tokens'][name]:.0f}",
            }
        )
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_throughput", description=__doc__.split("\n")[0])
    parser.add_argument("--repetitions", type=int, default=7, help="rounds of each, after one that warms up")
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--smoke", action="store_true", help="one small round: shows that it runs, measures nothing")
    options = parser.parse_args(words)
    results = []
    for scenario in (scenario for scenario in SCENARIOS if options.only in (None, scenario.name)):
        if options.smoke:
            scenario = Scenario(**{**asdict(scenario), "samples": 64})
        with tempfile.TemporaryDirectory() as folder:
            rounds = measure(scenario, 1 if options.smoke else options.repetitions, Path(folder))
        results.append(summary(scenario, rounds))
        show("", rows(results[-1]))
    if not options.smoke:
        print(save("rollout_throughput", {"results": results}))


if __name__ == "__main__":
    main()
