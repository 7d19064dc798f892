"""Where prompts come from: rows in an order that depends on the run seed alone, epoch after epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import DataError
from common.types import Prompt

_SHUFFLE_STREAM = 0x736C6970  # keeps the orders apart from everything else that is drawn from the run seed


class PromptRows(Protocol):
    """Rows of a data set, perhaps read lazily. The same index always gives the same row."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt:
        """Row `index` of `len(self)`; its `epoch` is not looked at."""
        ...


class PromptSource:
    """Cursor over the rows: position p is row `order(epoch)[p % n]` of epoch `p // n`.

    A position says everything, so a prompt can be found again after a restart without having been stored.

    Args:
        rows: the data set.
        seed: the run seed, >= 0.
        epochs: passes over the data; None: endless.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, rows: PromptRows, *, seed: int, epochs: int | None = None) -> None:
        if len(rows) == 0:
            raise DataError(
                "the training data has no rows: check data.source, and data.on_bad_row if some were skipped"
            )
        self._rows = rows
        self._seed = seed
        self._length = len(rows) * epochs if epochs is not None else None
        self._position = 0
        self._orders: dict[int, NDArray[np.int64]] = {}  # of the last two epochs asked for

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def position(self) -> int:
        """Prompts handed out so far, all epochs together."""
        return self._position

    @property
    def remaining(self) -> int | None:
        """Prompts still to come; None: endless."""
        return None if self._length is None else max(0, self._length - self._position)

    @property
    def exhausted(self) -> bool:
        return self.remaining == 0

    def next(self) -> Prompt | None:
        """The next prompt; None at the end of the last epoch."""
        if self.exhausted:
            return None
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    def at(self, position: int) -> Prompt:
        """The prompt at a position, wherever the cursor stands."""
        epoch, index = divmod(position, len(self._rows))
        return replace(self._rows[int(self._order(epoch)[index])], epoch=epoch)

    def state(self) -> dict[str, int]:
        """The cursor, and what it is a cursor of."""
        return {"position": self._position, "num_rows": len(self._rows), "seed": self._seed}

    def restore(self, state: Mapping[str, int]) -> None:
        """Put the cursor where `state` was taken.

        Raises:
            DataError: the data set or the seed is another one, so that the positions mean other prompts.
        """
        for name, now in (("num_rows", len(self._rows)), ("seed", self._seed)):
            if state[name] != now:
                raise DataError(
                    f"the run was started with {name} = {state[name]} and the prompt source now has {name} = {now}: "
                    "resume with the same data and seed, or start a new run directory"
                )
        self._position = state["position"]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """[n] int64; permutation of the rows. Raw Philox words are the same in every numpy, unlike `permutation`."""
        if epoch not in self._orders:
            stream = np.random.Philox(np.random.SeedSequence([self._seed, _SHUFFLE_STREAM, epoch]))
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = np.argsort(stream.random_raw(len(self._rows)), kind="stable")
        return self._orders[epoch]
