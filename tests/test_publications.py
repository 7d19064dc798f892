"""Which files in a shared folder are a run's."""

from __future__ import annotations

from pathlib import Path

from common.publications import (
    fetched_file,
    publication_file,
    publication_files,
    publication_name,
    unfinished_file,
    unfinished_in,
    versions_in,
)


def test_a_runs_files_are_found_in_every_form_and_no_others(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "runs" / "r (1)", tmp_path / "elsewhere" / "r (1)"
    name = publication_name(run_dir)
    whole = publication_file(tmp_path, name, 12)
    fetched = fetched_file(tmp_path, "c0ffee0123", f"/elsewhere/{whole.name}", "ab" * 32)
    ours = [whole, fetched, unfinished_file(whole), unfinished_file(fetched)]
    others = [
        publication_file(tmp_path, publication_name(other), 12),
        tmp_path / f"{whole.name}.txt",
        tmp_path / f"{name}-v.bin",
        tmp_path / "c0ffee01-slipstream.lock",
    ]
    for file in (*ours, *others):
        file.touch()
    assert publication_files(tmp_path, run_dir) == sorted(ours)
    assert versions_in(tmp_path, name) == {12: whole}
    assert unfinished_in(tmp_path, name) == [unfinished_file(whole)]


def test_in_a_folder_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert publication_files(tmp_path / "missing", tmp_path) == []
