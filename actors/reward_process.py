"""A scoring process: reads requests, calls one scoring function, writes results. Its parent ends it when it hangs.

Messages are msgpack maps behind a 4-byte little-endian length. The first one it writes is `{}`, or `{"error": …}` if
the function cannot be loaded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import time
from typing import Any, BinaryIO

import msgpack

from actors.scoring import Scorer, load_scorer, read_result
from common.errors import ConfigError
from common.imports import describe

LENGTH = struct.Struct("<I")
PR_SET_PDEATHSIG = 1
ERROR_LIMIT = 2000  # characters of an error's text


def main(function: str, import_dir: str, parent: int) -> None:
    die_with(parent)
    requests, replies = private_pipes()
    try:
        scorer = load_scorer(function, import_dir)
    except ConfigError as error:
        write_message(replies, {"error": str(error)})
        return
    write_message(replies, {})
    while (request := read_message(requests)) is not None:
        write_message(replies, answer(scorer, request))


def answer(scorer: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """`reward` and `metrics`, or `error`; and the `seconds` that the call took."""
    started = time.perf_counter()
    try:
        reward, metrics = read_result(scorer(request["response"], request["answer"], request["row"]))
        result = {"reward": reward, "metrics": metrics}
    except BaseException as error:  # exit() in a scoring function must not end the process, nor Ctrl-C half a message
        result = {"error": describe(error)[:ERROR_LIMIT].encode("utf-8", "replace").decode()}
    return {**result, "seconds": time.perf_counter() - started}


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. A loop in a scoring function would not notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output as files of our own: what a scoring function prints goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def read_message(file: BinaryIO) -> dict[str, Any] | None:
    """The next message; none at the end of the file."""
    header = file.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    message: dict[str, Any] = msgpack.unpackb(file.read(*LENGTH.unpack(header)), strict_map_key=False)
    return message


def write_message(file: BinaryIO, message: dict[str, Any]) -> None:
    data = msgpack.packb(message)
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()
