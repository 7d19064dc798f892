"""What a run records of stale and trained samples, and which prompts the log names."""

from __future__ import annotations

import logging

import pytest

from buffer.replay import ReplayBuffer
from deploy.records import buffer_gauges
from tests.buffer_kit import FakeClock, deliver, make_buffer, train_one


def lose_as_stale(buffer: ReplayBuffer, clock: FakeClock, num_stale: int) -> None:
    """Lease `num_stale` at version 0, train two batches of quick ones of two tokens and 1 s, then deliver 4 tokens."""
    slow = buffer.lease("slow", num_stale)
    for _ in range(2):
        quick = buffer.lease("quick", 1)
        clock.now += 1.0
        deliver(buffer, quick, [buffer.snapshot().version] * 2)
        train_one(buffer)
    clock.now += 6.0
    deliver(buffer, slow, [0, 0, 0, 0])
    assert buffer.take_batch() is None


def test_lengths_durations_and_staleness_of_what_is_trained_and_of_what_is_too_stale() -> None:
    buffer = make_buffer(clock=(clock := FakeClock()), batch_size=1, staleness_bound=1, on_exceeded="drop")
    assert "buffer/dropped_stale_length_mean" not in buffer_gauges(buffer.snapshot())
    lose_as_stale(buffer, clock, 1)
    gauges = buffer_gauges(buffer.snapshot())
    wanted = {
        "buffer/trained_length_mean": 2.0,
        "buffer/trained_duration_mean_s": 1.0,
        "buffer/trained_staleness_max": 0,
        "buffer/dropped_stale_length_mean": 4.0,
        "buffer/dropped_stale_duration_mean_s": 8.0,
        "buffer/dropped_stale_staleness_max": 2,
        "buffer/beyond_bound_prompts": 1,
    }
    assert {name: gauges[name] for name in wanted} == wanted


def test_prompts_that_do_not_meet_the_bound_are_named_with_their_length_and_duration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F-20."""
    buffer = make_buffer(clock=(clock := FakeClock()), batch_size=1, staleness_bound=1, on_exceeded="drop")
    with caplog.at_level(logging.WARNING):
        lose_as_stale(buffer, clock, 1)
    (line,) = [record.getMessage() for record in caplog.records]
    (name,) = buffer.snapshot().beyond_bound
    assert name in line
    assert "staleness.bound = 1" in line
    assert "by sampled tokens: 0 of 2 up to 2, 1 of 1 up to 4" in line
    assert "by seconds: 0 of 2 up to 1, 1 of 1 up to 8" in line


def test_a_run_that_loses_many_says_so_a_few_times_and_names_a_few(caplog: pytest.LogCaptureFixture) -> None:
    buffer = make_buffer(clock=(clock := FakeClock()), batch_size=20, staleness_bound=1, on_exceeded="drop")
    with caplog.at_level(logging.WARNING):
        for version in range(3):  # the first 20 of version 0 are never delivered in time
            leases = buffer.lease("actor-0", 20)
            if version:
                deliver(buffer, leases)
                train_one(buffer)
            else:
                slow = leases
        deliver(buffer, slow, 0)
        clock.now += 1.0
        buffer.take_batch()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" units")[0] for line in lines] == ["1", "2", "4", "8", "16"]
    assert all(line.count("row-") <= 10 for line in lines)
