"""The lease book: who holds which sample, until when, and who comes next."""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from buffer.records import Sample
from common.types import LeaseId, SampleState

K = TypeVar("K", str, int)


def sampling_seed(run_seed: int, sample_id: int, attempt: int) -> int:
    """Seed of one attempt at one sample, in [0, 2^63). Never a function of which actor serves it."""
    message = struct.pack("<QQQ", run_seed, sample_id, attempt)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


class Expiry(StrEnum):
    """Why a lease ran out."""

    SILENT = "silent"  # not heard of within the heartbeat limit: the actor is gone, or never got the lease
    DEADLINE = "deadline"  # the actor lives, the sample takes too long


class Timers(Generic[K]):
    """Keys with due times that may move later. Asked lazily: a key is looked at again when its earlier time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, K]] = []

    def push(self, due: float, key: K) -> None:
        heapq.heappush(self._heap, (due, key))

    def pop_due(self, now: float, due_of: Callable[[K], float | None]) -> Iterator[K]:
        """Keys that are due, each once.

        Args:
            due_of: when the key is due by what is known now; None: no longer.
        """
        while self._heap and self._heap[0][0] <= now:
            _, key = heapq.heappop(self._heap)
            due = due_of(key)
            if due is not None and due > now:
                self.push(due, key)
            elif due is not None:
                yield key


class LeaseBook:
    """Current leases, the queue of samples that wait for one, and the actors that are alive.

    Invariant: a sample is in the queue exactly while QUEUED, and under its `lease_id` here exactly while LEASED.
    Samples that were dropped while queued are skipped when their turn comes.
    """

    def __init__(self, *, heartbeat_s: float, deadline_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._deadline_s = deadline_s
        self._current: dict[LeaseId, Sample] = {}
        self._held: dict[str, dict[LeaseId, None]] = {}  # actor -> its leases, in order of issue
        self._last_heard: dict[str, float] = {}
        self._dead: set[str] = set()
        self._queue: deque[Sample] = deque()
        self._lease_timers: Timers[int] = Timers()
        self._actor_timers: Timers[str] = Timers()

    # Actors

    def hear(self, actor_id: str, now: float) -> None:
        """The actor is alive, unless it was buried."""
        if actor_id in self._dead:
            return
        if actor_id not in self._last_heard:
            self._actor_timers.push(now + self._heartbeat_s, actor_id)
        self._last_heard[actor_id] = now

    def forget_actor(self, actor_id: str) -> list[Sample]:
        """The actor is gone; returns the samples it held, whose leases are void now."""
        self._last_heard.pop(actor_id, None)
        lost = [self._current[lease_id] for lease_id in self._held.get(actor_id, {})]
        for sample in lost:
            self.void(sample)
        self._held.pop(actor_id, None)
        return lost

    def bury(self, actor_id: str) -> None:
        """The actor is dead: nothing is leased to this id again, and what it still says is not heard."""
        self._dead.add(actor_id)

    def buried(self, actor_id: str) -> bool:
        return actor_id in self._dead

    def silent_actors(self, now: float) -> list[str]:
        """Actors not heard of within the heartbeat limit. They stay in the book until `forget_actor`."""
        return list(dict.fromkeys(self._actor_timers.pop_due(now, self._actor_due)))

    def knows(self, actor_id: str) -> bool:
        """Whether the actor counts as alive."""
        return actor_id in self._last_heard

    @property
    def num_actors(self) -> int:
        return len(self._last_heard)

    # Leases

    def issue(self, sample: Sample, lease_id: LeaseId, actor_id: str, version: int, now: float) -> None:
        """Lease a sample. The caller moves it to LEASED."""
        sample.lease_id, sample.actor_id, sample.version_at_issue = lease_id, actor_id, version
        sample.issued_at = now
        self.adopt(sample, now)

    def adopt(self, sample: Sample, now: float) -> None:
        """Take up a lease that was issued before, its heartbeat limit starting now."""
        assert sample.lease_id is not None
        sample.heard_at = now
        self._current[sample.lease_id] = sample
        self._held.setdefault(sample.actor_id, {})[sample.lease_id] = None
        self._lease_timers.push(self._due(sample), sample.lease_id)

    def renew(self, actor_id: str, lease_ids: Sequence[LeaseId], now: float) -> list[LeaseId]:
        """The actor still works on these; returns those that are not its own any more.

        A lease the actor does not name is not renewed: the answer that brought it may have been lost.
        """
        self.hear(actor_id, now)
        void = []
        for lease_id in lease_ids:
            sample = self._current.get(lease_id)
            if sample is None or sample.actor_id != actor_id:
                void.append(lease_id)
            else:
                sample.heard_at = now
        return void

    def current(self, lease_id: LeaseId) -> Sample | None:
        """The sample under this lease, if the lease is current."""
        return self._current.get(lease_id)

    def holds(self, sample: Sample) -> bool:
        """Whether the sample is under a current lease."""
        return sample.lease_id is not None and self._current.get(sample.lease_id) is sample

    def close(self, sample: Sample) -> None:
        """End the current lease of a sample because its actor delivered or gave it back."""
        assert sample.lease_id is not None
        del self._held[sample.actor_id][sample.lease_id]
        del self._current[sample.lease_id]

    def void(self, sample: Sample) -> None:
        """End the current lease of a sample; what is delivered under it from now on is late."""
        self.close(sample)
        sample.lease_id = None

    def expired(self, now: float) -> list[tuple[Sample, Expiry]]:
        """Leases that ran out, each with the cause that came first. They stay in the book until `void`."""
        due = [self._current[LeaseId(lease_id)] for lease_id in self._lease_timers.pop_due(now, self._lease_due)]
        return [(sample, self._cause(sample)) for sample in due]

    def leased(self) -> Iterator[Sample]:
        """Samples under a current lease, oldest lease first."""
        return iter(self._current.values())

    # The queue

    def enqueue(self, sample: Sample) -> None:
        """Wait for a lease. The caller moves the sample to QUEUED."""
        sample.lease_id, sample.actor_id, sample.version_at_issue = None, "", -1
        self._queue.append(sample)

    def next_queued(self) -> Sample | None:
        """The sample that waited longest; it leaves the queue."""
        while self._queue:
            sample = self._queue.popleft()
            if sample.state is SampleState.QUEUED:
                return sample
        return None

    def _due(self, sample: Sample) -> float:
        return min(sample.heard_at + self._heartbeat_s, sample.issued_at + self._deadline_s)

    def _lease_due(self, lease_id: int) -> float | None:
        sample = self._current.get(LeaseId(lease_id))
        return None if sample is None else self._due(sample)

    def _actor_due(self, actor_id: str) -> float | None:
        heard = self._last_heard.get(actor_id)
        return None if heard is None else heard + self._heartbeat_s

    def _cause(self, sample: Sample) -> Expiry:
        silent_first = sample.heard_at + self._heartbeat_s <= sample.issued_at + self._deadline_s
        return Expiry.SILENT if silent_first else Expiry.DEADLINE
