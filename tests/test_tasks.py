"""The built-in tasks: right answers, and nothing held out that is trained on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from buffer.tasks import TASKS, digit_sums, sort_digits


@pytest.mark.parametrize("name", TASKS)
def test_no_held_out_row_is_a_training_row(name: str) -> None:
    train, held_out = (TASKS[name](split) for split in ("train", "held_out"))
    assert train
    assert held_out
    assert not {repr(row) for row in train} & {repr(row) for row in held_out}


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_the_same_in_every_process(name: str) -> None:
    code = f"from buffer.tasks import TASKS; print(TASKS[{name!r}]('train')[:3])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == str(TASKS[name]("train")[:3])


def test_every_string_of_four_digits_is_asked_once() -> None:
    rows = sort_digits("train") + sort_digits("held_out")
    assert {row["prompt"] for row in rows} == {f"s:{n:04d}=" for n in range(10_000)}
    assert len(rows) == 10_000


def test_sort_answers_are_sorted() -> None:
    answers = {row["prompt"]: row["answer"] for split in ("train", "held_out") for row in sort_digits(split)}
    assert answers["s:5271="] == "1257"
    assert answers["s:9900="] == "0099"


def test_first_rows_are_a_fair_sample_of_all() -> None:
    first_digits = {row["prompt"][2] for row in sort_digits("train")[:100]}
    assert first_digits == set("0123456789")


def test_every_pair_from_1_to_9_is_added_once() -> None:
    rows = digit_sums("train") + digit_sums("held_out")
    asked = {row["messages"][1]["content"]: row["answer"] for row in rows}
    assert asked == {f"What is {a} plus {b}?": str(a + b) for a in range(1, 10) for b in range(1, 10)}
    assert len(rows) == 81
    assert len(digit_sums("held_out")) == 16


def test_held_out_sum_is_not_trained_on_the_other_way_round() -> None:
    trained = {row["messages"][1]["content"] for row in digit_sums("train")}
    for row in digit_sums("held_out"):
        _, _, a, _, b = row["messages"][1]["content"].rstrip("?").split()
        assert f"What is {b} plus {a}?" not in trained
