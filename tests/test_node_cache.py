"""Publications of another node are fetched once for all actors of this one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from actors.node_cache import NodeCache
from common.errors import ResourceError
from common.publications import publication_files, publication_name
from common.weights import Canary, WeightManifest


def manifest(version: int, node_id: str = "far", digest: str = "0123456789abcdef0123") -> WeightManifest:
    canary = Canary(token_ids=(1, 2), logprobs=(-1.0,))
    path = f"/elsewhere/run-v{version}.bin"
    return WeightManifest(
        version=version, path=path, size_bytes=4, digest=digest, tensors=(), canary=canary, node_id=node_id
    )


class Fetches:
    """Brings the version number as bytes, after a moment."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def __call__(self, wanted: WeightManifest) -> bytes:
        self.versions.append(wanted.version)
        await asyncio.sleep(0.05)
        return b"v%d" % wanted.version


def test_a_publication_of_this_node_is_left_as_it_is(tmp_path: Path) -> None:
    fetches = Fetches()
    cache = NodeCache(tmp_path, "here", fetches)
    here = manifest(1, node_id="here")
    assert asyncio.run(cache.localise(here)) is here
    assert fetches.versions == []


def test_two_actors_at_once_fetch_it_once(tmp_path: Path) -> None:
    fetches = Fetches()

    async def both() -> list[WeightManifest]:
        caches = [NodeCache(tmp_path, "here", fetches) for _ in range(2)]
        return await asyncio.gather(*(cache.localise(manifest(3)) for cache in caches))

    first, second = asyncio.run(both())
    assert fetches.versions == [3]
    assert first == second
    assert Path(first.path).read_bytes() == b"v3"
    assert first.node_id == "here"


def test_the_two_newest_stay_and_closing_removes_them(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, "here", Fetches())
    for version in (1, 2, 3):
        asyncio.run(cache.localise(manifest(version)))
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == [
        f"here-run-v{version}-0123456789abcdef.bin" for version in (2, 3)
    ]
    cache.close()
    assert list(tmp_path.glob("*.bin")) == []


def test_a_fetch_that_broke_off_leaves_no_file_and_frees_the_lock(tmp_path: Path) -> None:
    async def breaks(wanted: WeightManifest) -> bytes:
        raise RuntimeError("node lost")

    with pytest.raises(RuntimeError, match="node lost"):
        asyncio.run(NodeCache(tmp_path, "here", breaks).localise(manifest(1)))
    assert list(tmp_path.glob("*.bin")) == []
    assert asyncio.run(NodeCache(tmp_path, "here", Fetches()).localise(manifest(1))).node_id == "here"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="gone"):
        asyncio.run(NodeCache(tmp_path / "gone", "here", Fetches()).localise(manifest(1)))


def test_a_publication_that_is_gone_is_left_to_the_engine_to_refuse(tmp_path: Path) -> None:
    async def gone(wanted: WeightManifest) -> bytes:
        raise FileNotFoundError(wanted.path)

    assert asyncio.run(NodeCache(tmp_path, "here", gone).localise(manifest(1))) == manifest(1)


def test_other_contents_under_the_same_name_are_fetched(tmp_path: Path) -> None:
    """A run that was ended and resumed may publish a version of the same file name again."""
    fetches = Fetches()
    first = asyncio.run(NodeCache(tmp_path, "here", fetches).localise(manifest(3, digest="a" * 64)))
    second = asyncio.run(NodeCache(tmp_path, "here", fetches).localise(manifest(3, digest="b" * 64)))
    assert fetches.versions == [3, 3]
    assert first.path != second.path


def test_writing_does_not_hold_up_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats go on beside it."""
    writers = []
    write = Path.write_bytes

    def noting(path: Path, data: bytes) -> int:
        writers.append(threading.current_thread())
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", noting)
    asyncio.run(NodeCache(tmp_path, "here", Fetches()).localise(manifest(1)))
    assert len(writers) == 1
    assert writers[0] is not threading.main_thread()


def test_a_write_that_broke_off_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ResourceError, match="No space left"):
        asyncio.run(NodeCache(tmp_path, "here", Fetches()).localise(manifest(1)))
    assert list(tmp_path.glob("*.bin*")) == []


def test_fetched_files_are_among_those_that_the_end_of_the_run_removes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    published = replace(manifest(1), path=f"/elsewhere/{publication_name(run_dir)}-v1.bin")
    local = asyncio.run(NodeCache(tmp_path, "0123456789", Fetches()).localise(published))
    assert publication_files(tmp_path, run_dir) == [Path(local.path)]
