"""Publications of another node are fetched once for all actors of this one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.node_cache import NodeCache
from common.errors import ResourceError
from common.weights import Canary, WeightManifest


def manifest(version: int, node_id: str = "far") -> WeightManifest:
    canary = Canary(token_ids=(1, 2), logprobs=(-1.0,))
    path = f"/elsewhere/run-v{version}.bin"
    return WeightManifest(
        version=version, path=path, size_bytes=4, digest="", tensors=(), canary=canary, node_id=node_id
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
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["here-run-v2.bin", "here-run-v3.bin"]
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
