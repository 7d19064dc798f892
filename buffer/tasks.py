"""Tasks that come with Slipstream, as rows of prompt and answer: pure functions, always the same rows in one order.

Every task has a training and a held-out part without a common row. Rows are in a fixed pseudo-random order, so that the
first n of them are a fair sample.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

Split = Literal["train", "held_out"]
Row = dict[str, Any]

SORT_LENGTH = 4  # digits to sort; 10^4 strings
SORT_HELD_OUT_ONE_IN = 10
SUMS_HELD_OUT = 8  # pairs of unequal digits, each in both orders: 16 of the 81 ordered pairs


def sort_digits(split: Split) -> list[Row]:
    """Sort four digits: `s:5271=` wants `1257`. About 9,000 strings to train on and 1,000 held out.

    Returns:
        Rows with `prompt` and `answer`, both text.
    """
    return [{"prompt": sort_prompt(digits), "answer": "".join(sorted(digits))} for digits in sort_strings(split)]


def sort_prompt(digits: str) -> str:
    return f"s:{digits}="


def sort_strings(split: Split) -> list[str]:
    """The strings of one part; membership depends on the string alone."""
    every = ("".join(digits) for digits in itertools.product("0123456789", repeat=SORT_LENGTH))
    held_out = split == "held_out"
    return sorted((s for s in every if (_hash(s) % SORT_HELD_OUT_ONE_IN == 0) == held_out), key=lambda s: (_hash(s), s))


def digit_sums(split: Split) -> list[Row]:
    """Sums of two digits from 1 to 9 as a chat, for models with a chat template. 65 pairs to train on, 16 held out.

    A pair is held out in both orders, so that no held-out sum is a trained one turned round.

    Returns:
        Rows with `messages` (a system and a user turn) and `answer`, a number as text.
    """
    unequal = sorted(itertools.combinations(range(1, 10), 2), key=lambda pair: _hash(f"{pair[0]}+{pair[1]}"))
    held_out = {order for a, b in unequal[:SUMS_HELD_OUT] for order in ((a, b), (b, a))}
    pairs = [pair for pair in itertools.product(range(1, 10), repeat=2) if (pair in held_out) == (split == "held_out")]
    return [
        {
            "messages": [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": f"What is {a} plus {b}?"},
            ],
            "answer": str(a + b),
        }
        for a, b in sorted(pairs, key=lambda pair: _hash(f"{pair[0]}+{pair[1]}"))
    ]


TASKS: Mapping[str, Callable[[Split], list[Row]]] = {
    "sort-digits": sort_digits,
    "digit-sums": digit_sums,
}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
