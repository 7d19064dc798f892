"""Data sources by name, as rows to train on and rows held out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from buffer.row_files import RawRow, jsonable, read_jsonl, read_parquet
from buffer.rows import BadRowError, content_hash, hold_out, to_prompt
from buffer.tasks import TASKS
from common.config import DataConfig, EvaluationConfig
from common.config_load import nearest
from common.errors import ConfigError, DataError
from common.imports import describe, load_object
from common.types import Prompt

__all__ = ["RowSource", "load_rows"]

log = logging.getLogger(__name__)

Split = Literal["train", "held_out"]

READERS: Mapping[str, Callable[[Path], Iterator[RawRow]]] = {".jsonl": read_jsonl, ".parquet": read_parquet}
KINDS = "task:NAME, reasoning-gym:NAME, python:MODULE:FUNCTION, or a file that ends in .jsonl or .parquet"
HELD_OUT_AT_MOST = 0.2  # share of a file's different prompts
GENERATED_HELD_OUT_ONE_IN = 10  # of what a generator can make, by the hash of the prompt
HELD_OUT_SEED = 2**30  # of generators, so that every run of a task is evaluated on the same prompts


class RowSource(Sequence[Prompt]):
    """Rows of a data set in a fixed order, with epoch 0."""

    def __init__(self, prompts: Sequence[Prompt], *, read: int, skipped: int = 0, repeats: int = 0) -> None:
        self._prompts = tuple(prompts)
        self.read = read
        """Rows that were found."""
        self.skipped = skipped
        """Malformed ones among them, left out because of `data.on_bad_row = "skip"`."""
        self.repeats = repeats
        """Rows in neither split, because they have the same prompt as one that is held out."""

    @property
    def kept(self) -> int:
        """Rows that are prompts, those of the other split included."""
        return self.read - self.skipped

    @property
    def left_out(self) -> str:
        """What happened to the rows that are in neither split, to be appended to a line; empty if there are none."""
        repeats = f"{self.repeats:,} left out because their prompts are held out already" if self.repeats else ""
        skipped = f"{self.skipped:,} skipped as malformed" if self.skipped else ""
        return "".join(f", {part}" for part in (repeats, skipped) if part)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self._prompts[index]


def load_rows(
    data: DataConfig, *, seed: int, split: Split, evaluation: EvaluationConfig, import_dir: str = ""
) -> RowSource:
    """The rows of one split. The two have no prompt in common unless `evaluation.source` brings its own.

    Tasks and reasoning-gym have a held-out part that is never trained on. From files and functions,
    `evaluation.num_prompts` prompts are held out, by the hash of their content, though never more than a fifth.

    Args:
        seed: of the run; decides what reasoning-gym generates for training.
        import_dir: folder that a `python:` source is imported from.

    Raises:
        DataError: the data is missing, malformed or empty; a malformed row is named by file and line.
        ConfigError: the source is unknown or cannot be used as it is set.
    """
    if split == "held_out" and not evaluation.num_prompts:
        return RowSource((), read=0)
    own = split == "held_out" and bool(evaluation.source)
    if own:
        data = data.model_copy(update={"source": evaluation.source})
    kind, _, name = data.source.partition(":")
    if kind == "task":
        rows = _task(name, data, split)
    elif kind == "reasoning-gym":
        rows = _reasoning_gym(name, data, seed, split, evaluation.num_prompts)
    else:
        rows = _read(data, import_dir)
        if own:
            rows = _part(rows, hold_out(rows, len(rows), at_most=1.0)[1])
        elif evaluation.num_prompts and not evaluation.source:
            rows = _split(rows, evaluation.num_prompts, split, data.source)
    if split == "held_out":
        rows = _part(rows, rows[: evaluation.num_prompts])
    if not len(rows) and (split == "train" or own):
        raise DataError(f"data source {data.source} holds no usable row ({rows.read} read, {rows.skipped} skipped)")
    return rows


def _part(rows: RowSource, prompts: Sequence[Prompt]) -> RowSource:
    return RowSource(prompts, read=rows.read, skipped=rows.skipped, repeats=rows.repeats)


def _split(rows: RowSource, num_prompts: int, split: Split, source: str) -> RowSource:
    train, held_out = hold_out(rows, num_prompts, at_most=HELD_OUT_AT_MOST)
    if len(held_out) < num_prompts and split == "held_out":
        log.warning(
            "evaluation.num_prompts = %d, but %s has too few different prompts: %d of %d rows are held out",
            num_prompts,
            source,
            len(held_out),
            len(rows),
        )
    repeats = len(rows) - len(train) - len(held_out)
    chosen = train if split == "train" else held_out
    return RowSource(chosen, read=rows.read, skipped=rows.skipped, repeats=repeats)


def _task(name: str, data: DataConfig, split: Split) -> RowSource:
    if name not in TASKS:
        hint = nearest(name, list(TASKS)) or ": choose " + ", ".join(TASKS)
        raise ConfigError(f"data.source = {data.source!r}: there is no task {name!r}{hint}")
    found = TASKS[name](split)[: data.num_rows]
    place = name if split == "train" else f"{name}/held-out"
    prompts = [
        to_prompt(
            row,
            f"{place}/{index}",
            prompt_column="messages" if "messages" in row else "prompt",
            answer_column="answer",
        )
        for index, row in enumerate(found)
    ]
    return RowSource(prompts, read=len(prompts))


def _reasoning_gym(name: str, data: DataConfig, seed: int, split: Split, num_held_out: int) -> RowSource:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"data.source = {data.source!r} needs the package reasoning-gym ({error}): "
            "pip install 'slipstream-rl[reasoning-gym]'"
        ) from None
    if name not in DATASETS:
        raise ConfigError(
            f"data.source = {data.source!r}: reasoning-gym has no task {name!r}{nearest(name, list(DATASETS))}"
        )
    held_out = split == "held_out"
    wanted = num_held_out if held_out else data.num_rows
    tries = 2 * GENERATED_HELD_OUT_ONE_IN * wanted + 1000  # small tasks repeat themselves
    try:
        made = reasoning_gym.create_dataset(name, size=tries, seed=HELD_OUT_SEED if held_out else seed, **data.options)
        _check_scoring(made, data.source)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigError(f"data.options = {data.options!r} does not suit {data.source}: {describe(error)}") from None
    place = f"{name}/held-out" if held_out else name
    prompts: dict[str, Prompt] = {}
    for index in range(tries):
        if len(prompts) == wanted:
            break
        entry = made[index]
        row = {"reasoning_gym": name, "options": data.options, "metadata": jsonable(entry["metadata"])}
        prompt = Prompt(prompt_id=f"{place}/{index}", epoch=0, text=entry["question"], answer=entry["answer"], row=row)
        content = content_hash(prompt)
        if (int(content, 16) % GENERATED_HELD_OUT_ONE_IN == 0) == held_out:
            prompts.setdefault(content if held_out else str(index), prompt)
    return RowSource(list(prompts.values()), read=len(prompts))


def _check_scoring(made: Any, source: str) -> None:
    """
    Raises:
        ConfigError: the task cannot score a row that was made plain data, as every row is on its way to be scored.
    """
    entry = made[0]
    if entry["answer"] is None:
        return
    if made.score_answer(entry["answer"], entry) != made.score_answer(entry["answer"], jsonable(entry)):
        raise ConfigError(f"data.source = {source!r}: its rows cannot be scored outside the process that made them")


def _read(data: DataConfig, import_dir: str) -> RowSource:
    """Every row of a file or a function, malformed ones treated as `data.on_bad_row` says."""
    if data.source.startswith("python:"):
        called, rows = data.source, _call(data, import_dir)
        name = data.source.rpartition(":")[2]
    else:
        path = Path(data.source).expanduser()
        if path.suffix not in READERS:
            raise ConfigError(f"data.source = {data.source!r} is not a source: give {KINDS}")
        called, rows = str(path), READERS[path.suffix](path)
        name = path.name
    prompts: list[Prompt] = []
    read, first_problem = 0, ""
    for raw in rows:
        read += 1
        try:
            if raw.problem:
                raise BadRowError(raw.problem)
            prompts.append(
                to_prompt(
                    raw.values,
                    f"{name}:{raw.number}",
                    prompt_column=data.prompt_column,
                    answer_column=data.answer_column,
                )
            )
        except BadRowError as error:
            problem = f"{called}:{raw.number}: {error}"
            if data.on_bad_row == "fail":
                raise DataError(f'{problem}. Mend it, or set data.on_bad_row = "skip" to leave such rows out') from None
            first_problem = first_problem or problem
    skipped = read - len(prompts)
    if skipped:
        log.warning(
            "%s: %d rows read, %d kept, %d skipped; the first: %s", called, read, len(prompts), skipped, first_problem
        )
    return RowSource(prompts, read=read, skipped=skipped)


def _call(data: DataConfig, import_dir: str) -> Iterator[RawRow]:
    """Rows that a function of the user's returns; `data.options` are its arguments."""
    function = load_object(data.source.removeprefix("python:"), import_dir, setting="data.source")
    try:
        rows: Iterable[Any] = function(**data.options)
        for number, values in enumerate(rows, start=1):
            if isinstance(values, Mapping):
                yield RawRow(number, jsonable(values))
            else:
                yield RawRow(number, {}, f"a mapping of columns is wanted, not {type(values).__name__}")
    except Exception as error:
        raise DataError(f"{data.source} raised {describe(error)}") from error
