"""How long an engine stands still when it loads new weights, next to a plain copy of the same bytes in memory.

    python -m benchmarks.weight_update --sizes tiny,100m --kinds in_process,async --output weight_update.json

Requests are in flight during every update. A random Qwen2 model in float32, on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.engine import Engine, EngineSettings, GenerationRequest, WeightUpdate, engine_environment, make_engine
from common.weights import Canary, WeightManifest

MAX_MODEL_LEN = 256
CANARY_IDS = tuple(range(24))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model, and how many requests are in flight while it is updated."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_in_flight: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(num_layers=2, hidden_size=128, vocab_size=128, num_in_flight=32),
    "100m": Size(num_layers=12, hidden_size=768, vocab_size=32_000, num_in_flight=8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Medians over the updates. Times in milliseconds."""

    size: str
    kind: str
    num_parameters: int
    num_in_flight: int
    num_updates: int
    validate_ms: float
    stall_ms: float
    stall_max_ms: float
    canary_ms: float
    copy_ms: float
    canary_error_nats: float  # the largest


def build_model(size: Size, folder: Path) -> tuple[int, list[WeightManifest]]:
    """Save a model, and write versions 1 and 2 of its weights; parameters, manifests."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from learner.publisher import write_tensors

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=size.vocab_size,
            hidden_size=size.hidden_size,
            intermediate_size=size.hidden_size * 8 // 3,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.hidden_size // 32,
            num_key_value_heads=size.hidden_size // 64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.save_pretrained(folder / "model")
    manifests = []
    with torch.no_grad():
        for version in (1, 2):
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
            ids = torch.tensor([CANARY_IDS])
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            path = folder / f"version-{version}.bin"
            with path.open("wb") as file:
                written = write_tensors(file, dict(model.named_parameters()).items(), "float32")
            manifests.append(
                WeightManifest(
                    version=version,
                    path=str(path),
                    size_bytes=written.size_bytes,
                    digest=written.digest,
                    tensors=written.tensors,
                    canary=Canary(token_ids=CANARY_IDS, logprobs=tuple(logprobs.tolist())),
                )
            )
    return model.num_parameters(), manifests


def copy_s(path: Path, repeats: int) -> float:
    """Median seconds of a copy of the file's bytes from memory to memory, by one thread."""
    source = np.fromfile(path, np.uint8)
    target = np.empty_like(source)
    target.fill(0)  # pages are there before the clock runs
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def updates_under_load(
    engine: Engine, manifests: Sequence[WeightManifest], num_updates: int, size: Size
) -> list[WeightUpdate]:
    """Load the two versions by turns while requests run; a finished one is replaced at once."""
    stopping = False

    async def keep_generating(slot: int) -> None:
        seed = slot
        while not stopping:
            await engine.generate(
                GenerationRequest(
                    request_id=str(slot),
                    prompt_ids=[slot % size.vocab_size, 1, 2, 3],
                    max_new_tokens=MAX_MODEL_LEN - 4 - slot,  # so that they do not end together
                    temperature=1.0,
                    seed=seed,
                )
            )
            seed += size.num_in_flight

    running = [asyncio.ensure_future(keep_generating(slot)) for slot in range(size.num_in_flight)]
    updates = []
    for version in range(1, num_updates + 2):
        await asyncio.sleep(1.0)
        updates.append(await engine.load_weights(replace(manifests[version % 2], version=version)))
    stopping = True
    await asyncio.gather(*running)
    return updates[1:]  # the first one touches everything for the first time


async def measure(name: str, kind: Literal["in_process", "async"], num_updates: int, folder: Path) -> Row:
    size = SIZES[name]
    num_parameters, manifests = build_model(size, folder)
    engine = make_engine(
        EngineSettings(
            model_path=str(folder / "model"),
            kind=kind,
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=size.num_in_flight,
        )
    )
    await engine.start()
    try:
        updates = await updates_under_load(engine, manifests, num_updates, size)
    finally:
        await engine.close()
    stalls = [update.stall_s for update in updates]
    return Row(
        size=name,
        kind=kind,
        num_parameters=num_parameters,
        num_in_flight=size.num_in_flight,
        num_updates=num_updates,
        validate_ms=1e3 * statistics.median(update.validate_s for update in updates),
        stall_ms=1e3 * statistics.median(stalls),
        stall_max_ms=1e3 * max(stalls),
        canary_ms=1e3 * statistics.median(update.canary_s for update in updates),
        copy_ms=1e3 * copy_s(Path(manifests[0].path), num_updates),
        canary_error_nats=max(update.canary_error for update in updates),
    )


def show(rows: Sequence[Row]) -> None:
    table = Table(title="weight update, medians in ms")
    for column in ("model", "engine", "in flight", "validate", "stall", "max", "canary", "plain copy", "stall / copy"):
        table.add_column(column, justify="left" if column in ("model", "engine") else "right")
    for row in rows:
        numbers = (row.validate_ms, row.stall_ms, row.stall_max_ms, row.canary_ms, row.copy_ms)
        table.add_row(
            f"{row.size} ({row.num_parameters / 1e6:.1f} M)",
            row.kind,
            str(row.num_in_flight),
            *(f"{number:.2f}" for number in numbers),
            f"{row.stall_ms / row.copy_ms:.1f}",
        )
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="tiny,100m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--kinds", default="in_process,async")
    parser.add_argument("--updates", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("weight_update.json"))
    options = parser.parse_args(arguments)
    settings: Any = {"model_path": "", "kind": "in_process", "device": "cpu", "max_model_len": 1, "max_num_seqs": 1}
    for name, value in engine_environment(EngineSettings(**settings)).items():
        os.environ.setdefault(name, value)
    rows = []
    for name in options.sizes.split(","):
        for kind in options.kinds.split(","):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                rows.append(asyncio.run(measure(name, kind, options.updates, Path(folder))))
            show(rows)
    report = {"cpus": os.cpu_count(), "load_average": os.getloadavg()[0], "rows": [asdict(row) for row in rows]}
    options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
