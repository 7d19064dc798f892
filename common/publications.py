"""Names of a run's files in memory that runs share: publications, and what actors of other nodes fetched of them."""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from pathlib import Path


def publication_name(run_dir: Path) -> str:
    """Prefix of a run's publications: its folder's name, told apart from others of that name."""
    return f"slipstream-{run_dir.name}-{blake2b(str(run_dir).encode(), digest_size=4).hexdigest()}"


def publication_file(folder: Path, name: str, version: int) -> Path:
    """Where the learner writes a version."""
    return folder / f"{name}-v{version}.bin"


def fetched_file(folder: Path, node_id: str, publication: str, digest: str) -> Path:
    """Where another node keeps its copy. By what it holds: a version may be published again with other contents."""
    return folder / f"{node_id[:8]}-{Path(publication).stem}-{digest[:16]}.bin"


def unfinished_file(path: Path) -> Path:
    """Beside `path`, until it is whole and renamed; no two processes write the same one."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def versions_in(folder: Path, name: str) -> dict[int, Path]:
    """Publications of one name, by version."""
    ours = re.compile(rf"{re.escape(name)}-v(\d+)\.bin")
    return {int(match[1]): path for path in folder.glob("*") if (match := ours.fullmatch(path.name))}


def unfinished_in(folder: Path, name: str) -> list[Path]:
    """Publications of one name whose writer was killed."""
    ours = re.compile(rf"\.{re.escape(name)}-v\d+\.bin\.\d+")
    return [path for path in folder.glob("*") if ours.fullmatch(path.name)]


def publication_files(folder: Path, run_dir: Path) -> list[Path]:
    """Everything of a run in a node's `weights.folder`, unfinished files and fetched copies included.

    To be removed by whoever ends the run: a process that is killed removes nothing.
    """
    name = re.escape(publication_name(run_dir))
    whole = rf"({name}-v\d+|\w{{1,8}}-{name}-v\d+-\w+)\.bin"
    ours = re.compile(rf"{whole}|\.{whole}\.\d+")
    return sorted(path for path in folder.glob("*") if ours.fullmatch(path.name))
