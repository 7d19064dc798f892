"""Rows from files, one at a time, each with its place. A row that cannot be read says why and does not end the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.errors import DataError


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it was found."""

    number: int  # from 1: the line of a text file, the row of a table
    values: Mapping[str, Any]  # empty when there is a problem
    problem: str = ""


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """One JSON object a line. Blank lines are not rows; a byte order mark and Windows line ends do not matter.

    Raises:
        DataError: the file cannot be opened.
    """
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):  # bytes end at \n alone: JSON may hold other line separators
            data = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if data:
                yield _parse(number, data)


def read_parquet(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet table in its order. Dates and other values that JSON lacks become text.

    Raises:
        DataError: the file cannot be opened or is not Parquet.
    """
    with _opened(path) as file:
        try:
            number = 0
            for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(number, jsonable(values))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from None


def jsonable(value: Any) -> Any:
    """The same as plain data: text as keys, lists for tuples and arrays, and text for whatever else JSON lacks."""
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise DataError(f"data file {path} does not exist") from None
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}") from None


def _parse(number: int, data: bytes) -> RawRow:
    try:
        values = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RawRow(number, {}, f"not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return RawRow(number, {}, f"not JSON: {error}")
    if not isinstance(values, dict):
        return RawRow(number, {}, f"a JSON object is wanted, not {type(values).__name__}")
    return RawRow(number, values)
