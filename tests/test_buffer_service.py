"""The buffer's Ray shell, without Ray: who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
import pytest

import buffer.service as service_module
from buffer.archive import part_files
from buffer.service import ReplayBufferService
from common import columns, wire
from common.config_load import load_config
from common.errors import DataError, WireError
from common.types import BatchId, BatchOutcome, DropReason, Failure, Receipt, SampleId, WeightVersion
from common.weights import Canary, WeightManifest
from tests.buffer_kit import rollout

T = TypeVar("T")
LIMIT_S = 20.0  # of a wait that a notice must end


@pytest.fixture(autouse=True)
def keep_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a service, standard output goes to its log file; here it stays the test's."""
    monkeypatch.setattr(service_module, "log_to_file", lambda run_dir, name: None)


def make_service(tmp_path: Path, *words: str) -> ReplayBufferService:
    small = ("recipe=sao", "buffer.batch_size=2", "data.num_rows=50", "staleness.bound=0")
    return ReplayBufferService(load_config(None, (*small, *words), recipes={"sao": {}}), tmp_path)


async def start_service(tmp_path: Path, *words: str) -> ReplayBufferService:
    service = make_service(tmp_path, *words)
    assert await service.start() > 0
    return service


def manifest(version: int) -> WeightManifest:
    canary = Canary(token_ids=(1, 2), logprobs=(-1.0,))
    return WeightManifest(version=version, path="", size_bytes=0, digest="", tensors=(), canary=canary)


def within_limit(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def test_nothing_is_leased_before_the_learner_has_published(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        assert (await service.poll("a", 2, 0, wait_s=0)).leases == ()
        waiting = asyncio.ensure_future(service.poll("a", 2, 0, wait_s=LIMIT_S))
        await asyncio.sleep(0)
        await service.announce(manifest(0))
        assert len((await waiting).leases) == 2

    within_limit(story())


def test_a_waiting_learner_is_woken_by_the_delivery_that_completes_its_batch(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(0))
        first, second = (await service.poll("a", 2, 0, wait_s=0)).leases
        waiting = asyncio.ensure_future(service.take_batch(wait_s=LIMIT_S))
        await asyncio.sleep(0)
        assert (await service.complete(wire.encode(rollout(first)))).accepted
        assert not waiting.done()
        assert (await service.complete(wire.encode(rollout(second)))).accepted
        answer = await waiting
        assert answer is not None
        fields, data = answer
        batch = columns.from_table(columns.from_bytes(data))
        assert fields["version"] == 0
        assert [t.sample_id for t in batch] == [first.sample_id, second.sample_id]

    within_limit(story())


def test_an_actor_at_the_shut_gate_is_woken_by_finish_and_hears_of_the_new_weights(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(0))
        for lease in (await service.poll("a", 2, 0, wait_s=0)).leases:
            await service.complete(wire.encode(rollout(lease)))
        answer = await service.take_batch(wait_s=0)
        assert answer is not None
        waiting = asyncio.ensure_future(service.poll("a", 2, 1, wait_s=LIMIT_S))  # knows of 1: only a lease wakes it
        await asyncio.sleep(0)
        await service.announce(manifest(1))
        assert not waiting.done()
        await service.finish(BatchId(answer[0]["batch_id"]), BatchOutcome.COMMITTED, WeightVersion(1))
        assert {lease.min_weight_version for lease in (await waiting).leases} == {1}
        news = await service.poll("b", 0, 0, wait_s=0)
        assert news.manifest is not None
        assert news.manifest.version == 1

    within_limit(story())


def test_a_waiting_call_delays_no_other(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        polls = [asyncio.ensure_future(service.poll(f"actor-{i}", 1, 0, wait_s=LIMIT_S)) for i in range(100)]
        await asyncio.sleep(0)
        assert (await service.status()).counts.issued == 0
        await service.close()
        assert all(poll.closing for poll in await asyncio.gather(*polls))

    within_limit(story())


def test_what_is_wrong_with_the_data_is_said_by_start_not_by_the_constructor(tmp_path: Path) -> None:
    async def story() -> None:
        service = make_service(tmp_path, "data.source=no-such-file.jsonl")
        with pytest.raises(DataError, match=r"no-such-file\.jsonl"):
            await service.start()
        await service.close()  # harmless

    within_limit(story())


def test_a_waiting_poll_of_a_dead_actor_takes_nothing_and_waits_no_longer(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(0))
        held = (await service.poll("actor-0", 2, 0, wait_s=0)).leases
        waiting = asyncio.ensure_future(service.poll("actor-0", 2, 0, wait_s=LIMIT_S))
        await asyncio.sleep(0)
        assert await service.lose_actor("actor-0") == 2
        answer = await waiting
        assert (answer.leases, answer.closing) == ((), True)
        again = (await service.poll("actor-0.1", 2, 0, wait_s=0)).leases
        assert [lease.sample_id for lease in again] == [lease.sample_id for lease in held]
        late = await asyncio.wait_for(service.poll("actor-0", 2, 0, wait_s=10 * LIMIT_S), LIMIT_S)
        assert (late.leases, late.closing) == ((), True)
        assert await service.heartbeat("actor-0", [held[0].lease_id]) == [held[0].lease_id]

    within_limit(story())


def test_finished_batches_wait_on_disk_and_nothing_of_them_is_left_after_the_run(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path, "staleness.bound=2")
        await service.announce(manifest(0))
        for lease in (await service.poll("a", 2, 0, wait_s=0)).leases:
            await service.complete(wire.encode(rollout(lease)))
        answer = await service.take_batch(wait_s=0)
        assert answer is not None
        await service.announce(manifest(1))
        await service.finish(BatchId(0), BatchOutcome.COMMITTED, WeightVersion(1))
        assert len(list((tmp_path / "finished").iterdir())) == 1
        assert await service.restore(None, WeightVersion(0)) == 2
        assert await service.take_batch(wait_s=0) == ({**answer[0], "batch_id": 1, "version": 2}, answer[1])
        await service.close()
        assert not (tmp_path / "finished").exists()

    within_limit(story())


def test_status_says_in_one_answer_whether_the_data_ended_and_whether_that_is_a_failure(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path, "data.num_rows=2", "data.epochs=1")
        await service.announce(manifest(0))
        first, second = (await service.poll("a", 2, 0, wait_s=0)).leases
        await service.complete(wire.encode(rollout(first, reward=None)))
        status = await service.status()
        assert (status.fatal, status.end_of_data) == (None, False)
        await service.complete(wire.encode(rollout(second, reward=None)))
        status = await service.status()
        assert status.end_of_data
        assert "without one usable trajectory of 2" in (status.fatal or "")

    within_limit(story())


def test_no_lease_after_stop_issuing_but_weights_go_out(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(3))
        await service.stop_issuing()
        poll = await service.poll("a", 2, 0, wait_s=0)
        assert poll.leases == ()
        assert poll.manifest is not None
        assert not poll.closing

    within_limit(story())


def test_of_several_deliveries_a_malformed_one_takes_no_other_with_it(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(0))
        first, second = (await service.poll("a", 2, 0, wait_s=0)).leases
        messages = [wire.encode(rollout(first)), b"garbage", wire.encode(rollout(second)), wire.encode(rollout(first))]
        taken, malformed, also_taken, again = await service.complete_all(messages)
        assert isinstance(malformed, WireError)
        assert [isinstance(r, Receipt) and r.accepted for r in (taken, also_taken, again)] == [True, True, False]
        assert (await service.status()).counts.ready == 2

    within_limit(story())


def test_what_ended_is_in_the_archive_when_the_service_closes(tmp_path: Path) -> None:
    async def story() -> None:
        service = await start_service(tmp_path)
        await service.announce(manifest(0))
        first, second = (await service.poll("a", 2, 0, wait_s=0)).leases
        await service.complete(wire.encode(rollout(first, reward=None)))
        await service.fail(second.lease_id, Failure(reason=DropReason.OVER_LONG, message="prompt of 99 tokens"))
        leases = (await service.poll("a", 2, 0, wait_s=0)).leases
        for lease in leases:
            await service.complete(wire.encode(rollout(lease)))
        answer = await service.take_batch(wait_s=0)
        assert answer is not None
        await service.announce(manifest(1))
        await service.finish(BatchId(answer[0]["batch_id"]), BatchOutcome.COMMITTED, WeightVersion(1))
        await service.close()
        rows = [row for path in part_files(tmp_path / "trajectories") for row in read_rows(path)]
        wanted = [(first.sample_id, "dropped_unscorable"), *((lease.sample_id, "trained") for lease in leases)]
        assert [(SampleId(row["sample_id"]), row["outcome"]) for row in rows] == wanted

    within_limit(story())


def read_rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]
