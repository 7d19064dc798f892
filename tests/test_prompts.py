"""Prompt source: order from the run seed alone, epochs, end, restore."""

from __future__ import annotations

from collections import Counter

import pytest

from buffer.leases import sampling_seed
from buffer.prompts import PromptSource
from common.errors import DataError
from common.types import Prompt
from tests.buffer_kit import Rows


def names(source: PromptSource, count: int) -> list[str]:
    prompts = [source.next() for _ in range(count)]
    return [prompt.prompt_id for prompt in prompts if prompt is not None]


def test_order_depends_on_the_seed_alone() -> None:
    """F-31: two runs with one seed see one order; another seed, another."""
    first, again = (PromptSource(Rows(50), seed=3) for _ in range(2))
    assert names(first, 150) == names(again, 150)
    assert names(PromptSource(Rows(50), seed=4), 50) != names(PromptSource(Rows(50), seed=3), 50)


def test_order_is_the_same_in_every_release() -> None:
    """A run that is resumed with a newer numpy must go on with the same prompts."""
    assert names(PromptSource(Rows(8), seed=3), 8) == [f"row-{index}" for index in (0, 1, 6, 7, 4, 5, 3, 2)]


def test_epochs_differ_and_each_covers_every_row() -> None:
    source = PromptSource(Rows(20), seed=0, epochs=3)
    prompts = [prompt for _ in range(60) if (prompt := source.next())]
    orders = [[prompt.prompt_id for prompt in prompts if prompt.epoch == epoch] for epoch in range(3)]
    assert all(sorted(order) == sorted(orders[0]) and len(set(order)) == 20 for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(("rows", "epochs"), [(1, 1), (3, 1), (3, 2)])
def test_the_end_is_said_and_stays(rows: int, epochs: int) -> None:
    source = PromptSource(Rows(rows), seed=0, epochs=epochs)
    for left in range(rows * epochs, 0, -1):
        assert (source.remaining, source.exhausted) == (left, False)
        assert source.next() is not None
    assert (source.remaining, source.exhausted) == (0, True)
    assert source.next() is None
    assert source.next() is None
    assert source.position == rows * epochs


def test_endless_source_never_ends() -> None:
    source = PromptSource(Rows(2), seed=0, epochs=None)
    assert Counter(names(source, 1000)) == {"row-0": 500, "row-1": 500}
    assert (source.remaining, source.exhausted) == (None, False)


def test_restored_cursor_goes_on_where_it_stood() -> None:
    source = PromptSource(Rows(7), seed=5, epochs=3)
    names(source, 10)
    state = source.state()
    rest = names(source, 11)
    again = PromptSource(Rows(7), seed=5, epochs=3)
    again.restore(state)
    assert names(again, 11) == rest
    assert again.exhausted


def test_a_position_names_its_prompt_wherever_the_cursor_stands() -> None:
    source = PromptSource(Rows(5), seed=1)
    handed_out = [source.next() for _ in range(17)]
    assert [source.at(position) for position in reversed(range(17))] == handed_out[::-1]
    assert source.position == 17


@pytest.mark.parametrize(("rows", "seed", "named"), [(6, 5, "num_rows"), (7, 6, "seed")])
def test_state_of_other_data_or_another_seed_is_refused(rows: int, seed: int, named: str) -> None:
    state = PromptSource(Rows(7), seed=5).state()
    with pytest.raises(DataError, match=named):
        PromptSource(Rows(rows), seed=seed).restore(state)


def test_empty_data_set_is_a_clear_error() -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptSource(Rows(0), seed=0)


def test_rows_are_read_only_when_their_turn_comes() -> None:
    class Lazy(Rows):
        read: list[int]

        def __init__(self) -> None:
            super().__init__(1000)
            self.read = []

        def __getitem__(self, index: int) -> Prompt:
            self.read.append(index)
            return super().__getitem__(index)

    rows = Lazy()
    source = PromptSource(rows, seed=0)
    assert rows.read == []
    names(source, 3)
    assert len(rows.read) == 3


def test_the_row_is_handed_on_whole_with_its_epoch() -> None:
    class Full(Rows):
        def __getitem__(self, index: int) -> Prompt:
            return Prompt(
                prompt_id="x", epoch=99, messages=({"role": "user", "content": "hi"},), answer="a", row={"k": 1}
            )

    source = PromptSource(Full(1), seed=0)
    source.next()
    assert source.next() == Prompt(
        prompt_id="x", epoch=1, messages=({"role": "user", "content": "hi"},), answer="a", row={"k": 1}
    )


def test_sampling_seeds_differ_by_run_sample_and_attempt() -> None:
    """F-31: seeds are a function of these three, and of nothing else."""
    seeds = {sampling_seed(run, sample, attempt) for run in range(10) for sample in range(100) for attempt in range(3)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(1, 2, 0) == 3519206687731978500  # the same in every release: a resumed run samples alike
