"""The archive keeps every row it was given, shows whole files only, and never stops a run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffer.archive import SCHEMA, TrajectoryArchive, highest_ids, part_files, read_part
from common.columns import from_table
from tests.trajectories import assert_same, make_rollout, make_trajectory


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_archive(folder: Path, clock: Clock | None = None, max_rows: int = 3) -> TrajectoryArchive:
    return TrajectoryArchive(folder, max_rows=max_rows, max_age_s=10.0, clock=clock or Clock())


def add(archive: TrajectoryArchive, *sample_ids: int, outcome: str = "trained") -> None:
    for sample_id in sample_ids:
        archive.add(make_trajectory(sample_id), outcome=outcome, batch_id=sample_id // 2, version=4)


def read_parts(folder: Path) -> list[pa.Table]:
    return [table for path in part_files(folder) if (table := read_part(path)) is not None]


def sample_ids(folder: Path) -> list[list[int]]:
    """Of each part, in order."""
    return [table["sample_id"].to_pylist() for table in read_parts(folder)]


def test_rows_come_back_with_their_outcome(tmp_path: Path) -> None:
    archive = make_archive(tmp_path)
    archive.add(make_trajectory(1), outcome="trained", batch_id=3, version=8)
    archive.add(make_trajectory(2, reward=None), outcome="dropped_unscorable", batch_id=-1, version=9)
    archive.close()
    (table,) = read_parts(tmp_path)
    assert table.schema.equals(SCHEMA)
    assert table.select(["sample_id", "outcome", "batch_id", "trained_version", "reward"]).to_pylist() == [
        {"sample_id": 1, "outcome": "trained", "batch_id": 3, "trained_version": 8, "reward": 0.5},
        {"sample_id": 2, "outcome": "dropped_unscorable", "batch_id": -1, "trained_version": 9, "reward": None},
    ]
    assert_same(from_table(table)[0], make_trajectory(1))


def test_part_is_written_when_it_is_full(tmp_path: Path) -> None:
    archive = make_archive(tmp_path, max_rows=3)
    add(archive, 1, 2)
    assert sample_ids(tmp_path) == []
    add(archive, 3, 4)
    assert sample_ids(tmp_path) == [[1, 2, 3]]
    archive.close()
    assert sample_ids(tmp_path) == [[1, 2, 3], [4]]


def test_part_is_written_when_its_first_row_is_old(tmp_path: Path) -> None:
    clock = Clock()
    archive = make_archive(tmp_path, clock)
    add(archive, 1)
    clock.now += 9.9
    archive.flush_if_due()
    assert sample_ids(tmp_path) == []
    clock.now += 0.1
    archive.flush_if_due()
    assert sample_ids(tmp_path) == [[1]]
    clock.now += 100.0  # time in which nothing was pending does not count
    add(archive, 2)
    assert sample_ids(tmp_path) == [[1]]


def test_nothing_to_write_makes_no_file(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "trajectories")
    archive.flush_if_due()
    archive.close()
    assert not (tmp_path / "trajectories").exists()
    assert read_parts(tmp_path / "trajectories") == []


def test_second_archive_on_the_folder_goes_on_numbering(tmp_path: Path) -> None:
    add(make_archive(tmp_path, max_rows=1), 1, 2)
    (tmp_path / "part-000001.parquet").unlink()
    (tmp_path / "part-000007.parquet").write_bytes((tmp_path / "part-000000.parquet").read_bytes())
    add(make_archive(tmp_path, max_rows=1), 3)
    assert [path.name for path in part_files(tmp_path)] == [f"part-00000{n}.parquet" for n in (0, 7, 8)]


def test_parts_are_ordered_by_number_and_not_by_name(tmp_path: Path) -> None:
    for number in (999999, 1000000, 2):
        (tmp_path / f"part-{number:06d}.parquet").touch()
    assert [int(path.stem[5:]) for path in part_files(tmp_path)] == [2, 999999, 1000000]


def test_chosen_columns_alone_are_read(tmp_path: Path) -> None:
    add(make_archive(tmp_path, max_rows=1), 1)
    table = read_part(tmp_path / "part-000000.parquet", ["reward", "outcome"])
    assert table.column_names == ["reward", "outcome"]


def test_folder_shows_whole_parts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_archive(tmp_path)
    add(archive, 1)
    seen: list[list[Path]] = []
    rename = os.replace

    def look_then_rename(source: Path, target: Path) -> Path:
        seen.append(part_files(tmp_path))
        assert pq.read_table(source).num_rows == 1
        rename(source, target)
        return target

    monkeypatch.setattr(Path, "replace", look_then_rename)
    archive.close()
    assert seen == [[]]
    assert sample_ids(tmp_path) == [[1]]


def test_full_disk_is_said_once_counted_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive = make_archive(tmp_path, max_rows=2)
    write = pq.write_table

    def fill_up(table: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(pq, "write_table", fill_up)
        add(archive, 1, 2, 3, 4)
        assert list(tmp_path.iterdir()) == []  # no half file takes up what little room there is
        monkeypatch.setattr(pq, "write_table", write)
        add(archive, 5, 6)
    assert archive.lost_rows == 4
    assert sample_ids(tmp_path) == [[5, 6]]
    assert [path.name for path in tmp_path.iterdir()] == ["part-000000.parquet"]
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
    assert "training goes on" in record.getMessage()


def test_folder_that_cannot_be_made_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    archive = make_archive(tmp_path / "file" / "trajectories", max_rows=1)
    add(archive, 1)
    assert archive.lost_rows == 1


def test_damaged_part_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(make_archive(tmp_path, max_rows=1), 1, 2)
    (tmp_path / "part-000000.parquet").write_bytes(b"PAR1")
    with caplog.at_level(logging.WARNING):
        assert sample_ids(tmp_path) == [[2]]
    assert "part-000000.parquet" in caplog.text


def test_highest_ids_are_those_of_all_parts(tmp_path: Path) -> None:
    assert set(highest_ids(tmp_path).values()) == {-1}
    archive = TrajectoryArchive(tmp_path)
    for number in (3, 9, 4):
        trajectory = make_rollout([1], [2], number, sample_id=number, reward=1.0)
        archive.add(trajectory, outcome="trained", batch_id=number // 2, version=0)
        archive.flush()
    assert highest_ids(tmp_path)["sample_id"] == 9
    assert highest_ids(tmp_path)["batch_id"] == 4
