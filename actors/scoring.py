"""Scoring functions: those that come with Slipstream, a user's own, and what counts as a reward.

Runs inside scoring processes, which start in 50 ms: imports neither numpy nor pydantic nor torch.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from common.errors import ConfigError
from common.imports import load_object

Scorer = Callable[[str, str | None, Mapping[str, Any]], Any]

# Digits with thousands separators, a fraction and an exponent. A minus after a digit is a subtraction, not a sign.
NUMBER = re.compile(r"(?:(?<![\d.])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")


def exact_match(response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """1 if response and answer are the same but for white space around them."""
    return float(response.strip() == needed(answer).strip())


def number_match(response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """1 if the last number in the response is the last number in the answer: 1,000 = 1000.0."""
    wanted = last_number(needed(answer))
    if wanted is None:
        raise ValueError(f"the answer {answer!r} holds no number, and number-match needs one")
    return float(last_number(response) == wanted)


def reasoning_gym_score(response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """Score in [0, 1] that the task itself gives. Rows come from a `reasoning-gym:` source."""
    if "reasoning_gym" not in row:
        raise ValueError('reward.function = "reasoning-gym" scores rows of data.source = "reasoning-gym:NAME" alone')
    score = _score_answer(row["reasoning_gym"], json.dumps(row["options"]))
    entry = {"question": row["prompt"], "answer": answer, "metadata": row["metadata"]}
    return float(score(response.strip(), entry))


@functools.cache
def _score_answer(name: str, options: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
    return dataset.score_answer  # type: ignore[no-any-return]


BUILT_IN: Mapping[str, Scorer] = {
    "exact-match": exact_match,
    "number-match": number_match,
    "reasoning-gym": reasoning_gym_score,
}


def load_scorer(function: str, import_dir: str) -> Scorer:
    """A scoring function by the name that `reward.function` takes.

    Raises:
        ConfigError: it cannot be imported, or cannot be called.
    """
    if function in BUILT_IN:
        return BUILT_IN[function]
    scorer: Scorer = load_object(function, import_dir, setting="reward.function")
    if not callable(scorer):
        raise ConfigError(f"reward.function = {function!r} cannot be called: it is a {type(scorer).__name__}")
    return scorer


def needed(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the row has no answer: set data.answer_column, or take a reward that needs none")
    return answer


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("−", "-")) if found else None


def read_result(result: Any) -> tuple[float, dict[str, float]]:
    """Reward and metrics from what a scoring function returned: a number, or a number and a mapping of numbers.

    Raises:
        TypeError, ValueError: it is neither, or not finite.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        result, metrics = result
    return _number(result), {str(name): _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float:
    if not hasattr(type(value), "__float__"):  # None and texts among others
        raise TypeError(f"returned {value!r}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, which is not finite")
    return number
