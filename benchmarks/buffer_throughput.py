"""Samples per second through the replay buffer in memory: leased, delivered, taken in a batch, finished, forgotten.

CPU time of the buffer alone, in one thread: making the trajectories is not counted, nor is Ray, nor a store on disk.

    python -m benchmarks.buffer_throughput
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.results import save, show
from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer, ReplaySettings
from common.types import BatchOutcome, FinishReason, Lease, Prompt, Trajectory, Turn, WeightVersion

NUM_ACTORS = 4
SLOTS = 64
PROMPT_TOKENS, SAMPLED_TOKENS = 32, 200


@dataclass(frozen=True, kw_only=True)
class Result:
    group_size: int
    on_exceeded: str
    samples_per_s: float
    microseconds_per_lease: float
    microseconds_per_delivery: float


class Rows:
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"row/{index}", epoch=0, text=str(index))


def measure(group_size: int, on_exceeded: str, num_samples: int) -> Result:
    """Batches of 256 with η = 4, as fast as they form; one delivery in 16 fails its reward."""
    settings = ReplaySettings(seed=0, batch_size=256, group_size=group_size, on_exceeded=on_exceeded)  # type: ignore[arg-type]
    buffer = ReplayBuffer(settings, PromptSource(Rows(), seed=0), time.monotonic)
    leasing = delivering = training = 0.0
    version = done = 0
    while done < num_samples:
        began = time.process_time()
        leases = [lease for actor in range(NUM_ACTORS) for lease in buffer.lease(f"actor-{actor}", SLOTS)]
        leasing += time.process_time() - began
        trajectories = [_rollout(lease, version) for lease in leases]
        began = time.process_time()
        for trajectory in trajectories:
            buffer.complete(trajectory)
        delivering += time.process_time() - began
        began = time.process_time()
        while batch := buffer.take_batch():
            version += 1
            buffer.finish(batch.batch_id, BatchOutcome.COMMITTED, WeightVersion(version))
            buffer.forget_batches_up_to(batch.batch_id)
        training += time.process_time() - began
        done += len(leases)
    return Result(
        group_size=group_size,
        on_exceeded=on_exceeded,
        samples_per_s=done / (leasing + delivering + training),
        microseconds_per_lease=1e6 * leasing / done,
        microseconds_per_delivery=1e6 * delivering / done,
    )


def _rollout(lease: Lease, version: int) -> Trajectory:
    total = PROMPT_TOKENS + SAMPLED_TOKENS
    mask = np.arange(total) >= PROMPT_TOKENS
    return Trajectory(
        sample_id=lease.sample_id,
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        prompt_id=lease.prompt.prompt_id,
        epoch=lease.prompt.epoch,
        attempt=lease.attempt,
        token_ids=np.zeros(total, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
        weight_versions=np.where(mask, np.int32(version), np.int32(-1)),
        turns=(Turn(start=PROMPT_TOKENS, stop=total, finish_reason=FinishReason.STOP),),
        temperature=1.0,
        reward=None if lease.sample_id % 16 == 0 else 1.0,
        finish_reason=FinishReason.STOP,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000)
    num_samples = parser.parse_args().samples
    logging.disable(logging.WARNING)  # one line a dropped sample
    results = [measure(size, mode, num_samples) for size in (1, 8) for mode in ("mask", "drop", "wait")]
    show(
        "Replay buffer, in memory",
        [
            {
                "group size": str(result.group_size),
                "on_exceeded": result.on_exceeded,
                "samples/s": f"{result.samples_per_s:,.0f}",
                "µs per lease": f"{result.microseconds_per_lease:.1f}",
                "µs per delivery": f"{result.microseconds_per_delivery:.1f}",
            }
            for result in results
        ],
    )
    print(save("buffer_throughput", {"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
