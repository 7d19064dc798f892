"""Numbers as a person reads them."""

from __future__ import annotations

import pytest

from deploy.format import arrow, duration, number, plural, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 1234, 0.123456, 1e-6, "x", True)] == [
        "–",
        "1,234",
        "0.1235",
        "1e-06",
        "x",
        "True",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 * 999, "999 MiB"),
        (2**45, "32 TiB"),
        (2**51, "2048 TiB"),
    ],
)
def test_sizes_are_short(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_change_is_an_arrow_when_there_are_two_values() -> None:
    assert [arrow(None, None), arrow(0.4, None), arrow(0.4, 0.9)] == ["–", "0.400", "0.400 → 0.900"]


def test_nouns_agree_with_their_number() -> None:
    assert [plural(n, "prompt") for n in (0, 1, 1200)] == ["0 prompts", "1 prompt", "1,200 prompts"]
    assert [plural(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
