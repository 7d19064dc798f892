"""When the buffer says that a run cannot make progress, and when it does not."""

from __future__ import annotations

import json

import pytest

from buffer.build import replay_settings
from buffer.prompts import PromptSource
from buffer.replay import ReplayBuffer
from common.config_load import load_config
from common.types import DropReason, Failure, Lease
from tests.buffer_kit import FakeClock, Rows, deliver, make_buffer, make_settings, train_one

OVER_LONG = Failure(reason=DropReason.OVER_LONG, message="500 tokens, limit 32")
BROKEN = Failure(reason=DropReason.FAILED, message="RuntimeError: boom")


def lose(buffer: ReplayBuffer, failure: Failure) -> Lease:
    """Lease one sample and give it back for good."""
    lease = buffer.lease("actor-0", 1)[0]
    buffer.fail(lease.lease_id, failure)
    return lease


def test_over_long_prompts_do_not_end_a_run_whose_first_generation_takes_long() -> None:
    buffer = make_buffer(rows=100, max_lost_in_a_row=3)
    slow = buffer.lease("actor-0", 1)[0]
    for _ in range(250):  # more than two passes over the data
        lose(buffer, OVER_LONG)
        assert buffer.fatal is None
    deliver(buffer, slow)
    assert buffer.fatal is None


def test_a_small_data_set_of_which_most_is_over_long_goes_round_and_round_while_the_good_row_is_generated() -> None:
    buffer = make_buffer(rows=4, batch_size=8, max_lost_in_a_row=3)
    good: list[Lease] = []
    for _ in range(60):
        leases = buffer.lease("actor-0", 1)
        if not leases:
            break
        if leases[0].prompt.prompt_id == "row-0":
            good += leases
        else:
            buffer.fail(leases[0].lease_id, OVER_LONG)
        assert buffer.fatal is None
    assert len(good) > 2
    deliver(buffer, good)
    train_one(buffer)
    assert buffer.fatal is None


def test_endless_data_of_which_every_prompt_is_over_long_ends_the_run_with_the_reason() -> None:
    buffer = make_buffer(rows=10, epochs=None, max_lost_in_a_row=3)
    for _ in range(9):
        lose(buffer, OVER_LONG)
        assert buffer.fatal is None
    lose(buffer, OVER_LONG)
    assert buffer.fatal is not None
    assert "a whole pass over the data, 10 prompts" in buffer.fatal
    assert "500 tokens, limit 32" in buffer.fatal
    assert buffer.lease("actor-0", 1) == []


def test_one_failed_pass_over_very_little_data_is_not_enough() -> None:
    buffer = make_buffer(rows=2, epochs=None, max_lost_in_a_row=5)
    for _ in range(4):
        lose(buffer, OVER_LONG)
        assert buffer.fatal is None
    lose(buffer, OVER_LONG)
    assert buffer.fatal is not None


def test_finite_data_of_which_every_prompt_is_over_long_ends_the_run_with_the_reason() -> None:
    buffer = make_buffer(rows=2, epochs=1)
    lose(buffer, OVER_LONG)
    lose(buffer, OVER_LONG)
    status = buffer.snapshot()
    assert status.end_of_data
    assert "500 tokens, limit 32" in (status.fatal or "")


def test_a_group_that_fails_counts_once() -> None:
    """Three groups of eight: 24 failed members, three prompts."""
    buffer = make_buffer(batch_size=8, group_size=8, max_attempts=1, max_lost_in_a_row=3)
    for _ in range(3):
        assert buffer.fatal is None
        for lease in buffer.lease("actor-0", 8):
            buffer.fail(lease.lease_id, BROKEN)  # with the seventh, the last one's lease is void
    assert "3 prompts in a row" in (buffer.fatal or "")


def test_the_reason_named_is_the_failure_not_a_long_prompt_before_it() -> None:
    buffer = make_buffer(max_attempts=1, max_lost_in_a_row=2)
    lose(buffer, OVER_LONG)
    lose(buffer, BROKEN)
    assert buffer.fatal is None
    lose(buffer, BROKEN)
    assert "boom" in (buffer.fatal or "")


@pytest.mark.parametrize(("batch_size", "limit"), [(8, 64), (64, 320)])
def test_the_limit_of_losses_grows_with_the_admission_limit(batch_size: int, limit: int) -> None:
    words = ("recipe=sao", f"buffer.batch_size={batch_size}", "staleness.bound=4")
    assert replay_settings(load_config(None, words, recipes={"sao": {}})).max_lost_in_a_row == limit


def test_a_resumed_run_whose_last_prompt_fails_has_trained_before() -> None:
    buffer = make_buffer(rows=5, epochs=1)
    deliver(buffer, buffer.lease("actor-0", 4))
    train_one(buffer)
    state = json.loads(json.dumps(buffer.state()))
    again = ReplayBuffer(make_settings(), PromptSource(Rows(5), seed=7, epochs=1), FakeClock(), state=state)
    lose(again, OVER_LONG)
    status = again.snapshot()
    assert (status.end_of_data, status.fatal) == (True, None)


def test_a_resumed_run_judges_a_whole_pass_from_where_it_goes_on() -> None:
    buffer = make_buffer(rows=5, epochs=None, max_lost_in_a_row=2)
    deliver(buffer, buffer.lease("actor-0", 4))
    train_one(buffer)
    state = json.loads(json.dumps(buffer.state()))
    again = ReplayBuffer(
        make_settings(max_lost_in_a_row=2), PromptSource(Rows(5), seed=7, epochs=None), FakeClock(), state=state
    )
    for _ in range(4):
        lose(again, OVER_LONG)
        assert again.fatal is None
    lose(again, OVER_LONG)
    assert "a whole pass" in (again.fatal or "")
