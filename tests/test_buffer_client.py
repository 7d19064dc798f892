"""The actor's end of the link to the buffer, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from buffer.client import RayActorLink
from common import wire
from common.errors import WireError
from common.types import Receipt
from tests.fakes import make_lease
from tests.trajectories import make_trajectory


class SlowService:
    """Answers each call when told to. In its place a handle has `.complete_all.remote(...)`."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []  # sample ids of each call
        self.answers: list[asyncio.Future[Any]] = []
        self.complete_all = SimpleNamespace(remote=self._complete_all)

    def _complete_all(self, messages: list[bytes]) -> asyncio.Future[Any]:
        self.calls.append([wire.decode(message).sample_id for message in messages])
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


def deliver(link: RayActorLink, number: int) -> asyncio.Task[Receipt]:
    return asyncio.ensure_future(link.complete(make_trajectory(sample_id=number, lease_id=make_lease(number).lease_id)))


def make_link(service: SlowService) -> RayActorLink:
    async def localise(manifest: Any) -> Any:
        raise NotImplementedError

    return RayActorLink(service, localise)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_deliveries_during_a_call_share_the_next_one_and_each_gets_its_own_answer() -> None:
    async def story() -> None:
        service = SlowService()
        link = make_link(service)
        first = deliver(link, 0)
        await settle()
        later = [deliver(link, number) for number in (1, 2, 3)]
        await settle()
        assert service.calls == [[0]]
        service.answers[0].set_result([Receipt(accepted=True)])
        assert (await first).accepted
        await settle()
        assert service.calls == [[0], [1, 2, 3]]
        later[1].cancel()
        service.answers[1].set_result([Receipt(accepted=False), Receipt(accepted=True), WireError("bad")])
        results = await asyncio.gather(*later, return_exceptions=True)
        assert isinstance(results[0], Receipt)
        assert not results[0].accepted
        assert [type(result) for result in results[1:]] == [asyncio.CancelledError, WireError]
        last = deliver(link, 4)
        await settle()
        service.answers[2].set_result([Receipt(accepted=True)])
        assert (await last).accepted

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_call_that_fails_fails_everybody_in_it_and_nobody_after() -> None:
    async def story() -> None:
        service = SlowService()
        link = make_link(service)
        together = [deliver(link, number) for number in (0, 1)]
        await settle()
        after = deliver(link, 2)
        service.answers[0].set_exception(ActorUnavailableError("away", b"0" * 16))
        results = await asyncio.gather(*together, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionError, ConnectionError]
        await settle()
        service.answers[1].set_result([Receipt(accepted=True)])
        assert (await after).accepted
        assert service.calls == [[0, 1], [2]]

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_lone_delivery_waits_for_no_other() -> None:
    async def story() -> None:
        service = SlowService()
        task = deliver(make_link(service), 5)
        await settle()
        service.answers[0].set_result([Receipt(accepted=True)])
        assert (await task).accepted
        assert service.calls == [[5]]

    asyncio.run(asyncio.wait_for(story(), 20))
