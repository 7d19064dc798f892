"""A cached folder is complete or not there, whoever is killed and whoever comes first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ResourceError
from learner.model_cache import ABANDONED_AFTER_S, cached_folder, default_cache_dir


def write(text: str, folder: Path) -> None:
    (folder / "file").write_text(text)


def test_folder_is_built_once(tmp_path: Path) -> None:
    cache = tmp_path / "not" / "there" / "yet"
    first = cached_folder(cache, "model", lambda folder: write("first", folder))
    again = cached_folder(cache, "model", lambda folder: write("again", folder))
    assert first == again == cache / "model"
    assert (first / "file").read_text() == "first"
    assert os.listdir(cache) == ["model"]


def test_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write("half", folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached_folder(tmp_path, "model", fail)
    assert os.listdir(tmp_path) == []
    assert (cached_folder(tmp_path, "model", lambda folder: write("whole", folder)) / "file").read_text() == "whole"


def test_killed_build_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys\n"
        "from learner.model_cache import cached_folder\n"
        "def build(folder):\n"
        "    (folder / 'file').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
        "cached_folder(pathlib.Path(sys.argv[1]), 'model', build)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == -9
    assert not (tmp_path / "model").exists()
    assert (cached_folder(tmp_path, "model", lambda folder: write("whole", folder)) / "file").read_text() == "whole"


def test_first_of_two_builders_wins_and_the_other_uses_its_result(tmp_path: Path) -> None:
    def build_while_another_finishes(folder: Path) -> None:
        write("slow", folder)
        cached_folder(tmp_path, "model", lambda other: write("fast", other))

    final = cached_folder(tmp_path, "model", build_while_another_finishes)
    assert (final / "file").read_text() == "fast"
    assert os.listdir(tmp_path) == ["model"]


def test_leftovers_of_killed_builds_are_removed_once_they_are_old(tmp_path: Path) -> None:
    old, young = tmp_path / ".model-old", tmp_path / ".model-young"
    for folder in (old, young):
        folder.mkdir()
        write("half", folder)
    long_ago = time.time() - ABANDONED_AFTER_S - 60
    os.utime(old, (long_ago, long_ago))
    cached_folder(tmp_path, "model", lambda folder: write("whole", folder))
    assert not old.exists()
    assert young.exists()


def test_cache_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="SLIPSTREAM_CACHE") as error:
        cached_folder(tmp_path / "file", "model", lambda folder: write("", folder))
    assert str(tmp_path / "file") in str(error.value)


def test_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere")
    monkeypatch.setenv("SLIPSTREAM_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/slipstream")
