"""The learner's calls over Ray, without Ray: what is repeated, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from buffer.client import ANSWER_LIMIT_S, PAUSES_S, RayLearnerLink
from common import columns
from common.types import Batch, BatchId, BatchOutcome, SampleId, WeightVersion
from tests.fakes import make_manifest
from tests.trajectories import make_trajectory

UNAVAILABLE = ActorUnavailableError("the connection broke", None)


class Method:
    """`handle.method`: answers come from a list; exceptions in it are raised by `ray.get`."""

    def __init__(self, name: str, answers: list[Any], calls: list[tuple[Any, ...]]) -> None:
        self._name, self._answers, self._calls = name, answers, calls

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        self._calls.append((self._name, *arguments))
        answer = self._answers.pop(0)

        def get() -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return get


class Service:
    """A buffer behind Ray."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Method:
        return Method(name, self._answers, self.calls)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Limits of the calls."""
    asked: list[float] = []

    def get(ref: Callable[[], Any], timeout: float) -> Any:
        asked.append(timeout)
        return ref()

    monkeypatch.setattr("buffer.client.ray.get", get)
    return asked


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch, limits: list[float]) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("buffer.client.time.sleep", slept.append)
    return slept


def test_calls_carry_their_arguments_and_answers(pauses: list[float], limits: list[float]) -> None:
    service = Service(None, None, 8, {"cursor": 3}, None)
    link = RayLearnerLink(service)
    manifest = make_manifest(7)
    link.announce(manifest)
    link.finish(BatchId(4), BatchOutcome.COMMITTED, WeightVersion(7))
    assert link.restore(BatchId(3), WeightVersion(6)) == 8
    assert link.state() == {"cursor": 3}
    link.forget_batches_up_to(BatchId(2))
    assert service.calls == [
        ("announce", manifest),
        ("finish", 4, BatchOutcome.COMMITTED, 7),
        ("restore", 3, 6),
        ("state",),
        ("forget_batches_up_to", 2),
    ]
    assert limits == [ANSWER_LIMIT_S] * 5
    assert pauses == []


def test_a_batch_is_put_together_again(pauses: list[float], limits: list[float]) -> None:
    trajectories = [make_trajectory(sample_id=SampleId(n)) for n in (5, 6)]
    fields = {"batch_id": BatchId(1), "version": WeightVersion(2), "is_last": True, "is_tail": False}
    data = columns.to_bytes(columns.to_table(trajectories))
    service = Service(None, (fields, data))
    link = RayLearnerLink(service)
    assert link.take_batch(2.0) is None
    batch = link.take_batch(2.0)
    assert isinstance(batch, Batch)
    assert (batch.batch_id, batch.version, batch.is_last) == (1, 2, True)
    assert [trajectory.sample_id for trajectory in batch.trajectories] == [5, 6]
    assert service.calls == [("take_batch", 2.0)] * 2
    assert limits == [2.0 + ANSWER_LIMIT_S] * 2


@pytest.mark.parametrize("error", [UNAVAILABLE, GetTimeoutError("no answer")])
def test_a_buffer_that_is_out_of_reach_for_a_moment_is_asked_again(error: Exception, pauses: list[float]) -> None:
    service = Service(error, error, error, {"cursor": 1})
    assert RayLearnerLink(service).state() == {"cursor": 1}
    assert service.calls == [("state",)] * 4
    assert pauses == list(PAUSES_S)
    assert pauses == sorted(pauses)


@pytest.mark.parametrize("error", [UNAVAILABLE, GetTimeoutError("no answer")])
def test_one_that_stays_out_of_reach_is_given_up(error: Exception, pauses: list[float]) -> None:
    service = Service(*[error] * 10)
    with pytest.raises(type(error)):
        RayLearnerLink(service).finish(BatchId(4), BatchOutcome.COMMITTED, WeightVersion(7))
    assert len(service.calls) == 1 + len(PAUSES_S)


@pytest.mark.parametrize("error", [ActorDiedError(), ValueError("batch 4 is not open")])
def test_death_and_refusals_are_not_repeated(error: Exception, pauses: list[float]) -> None:
    service = Service(error, None)
    with pytest.raises(type(error)):
        RayLearnerLink(service).finish(BatchId(4), BatchOutcome.COMMITTED, WeightVersion(7))
    assert len(service.calls) == 1
    assert pauses == []
