"""Reading the archive: the right trajectories in the right order, and exactly what the model wrote."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from buffer.archive import TrajectoryArchive
from common.config_load import validate
from common.errors import ConfigError, DataError
from common.types import FinishReason, Trajectory, Turn
from deploy.rollouts import Query, Reader, Rollout, find, headline, outcomes, printable, show, to_json
from deploy.run_dir import RunDir, new_run_dir
from tests.trajectories import make_rollout, make_trajectory

WORDS = ["<end>", "a", "b", "c", "▁d", "\x1b[2J", "é"]


def save_tokenizer(folder: Path, decoder: Any = None) -> Path:
    """Token n is the word n of `WORDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoder or decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_run(tmp_path: Path, *, rows: list[tuple[Trajectory, str]], rows_a_part: int = 2) -> RunDir:
    run_dir, _ = new_run_dir(validate({"run_dir": str(tmp_path / "run")}))
    save_tokenizer(run_dir.tokenizer)
    archive = TrajectoryArchive(run_dir.trajectories, max_rows=rows_a_part)
    for number, (trajectory, outcome) in enumerate(rows):
        archive.add(trajectory, outcome=outcome, batch_id=number, version=9)
    archive.close()
    return run_dir


def rollout(sample_id: int, reward: float | None, version: int = 0) -> Trajectory:
    return make_rollout([1, 2], [3, 0], version, sample_id=sample_id, reward=reward, prompt_id=f"task/{sample_id % 3}")


ROWS = [
    (rollout(0, 0.5, 0), "trained"),
    (rollout(1, 1.0, 1), "trained"),
    (rollout(2, None, 2), "dropped_unscorable"),
    (rollout(3, 0.0, 3), "dropped_stale"),
    (rollout(4, 0.5, 4), "trained"),
    (make_trajectory(5, reward=-1.0), "evaluation"),  # under versions 3 and 4
    (rollout(6, 0.25, 6), "trained"),
]


def found(run_dir: RunDir, **query: Any) -> list[int]:
    return [rollout.trajectory.sample_id for rollout in find(run_dir.trajectories, Query(**query))]


# Finding


@pytest.mark.parametrize(
    ("query", "sample_ids"),
    [
        ({}, [6, 5, 4, 3, 2]),
        ({"count": 2}, [6, 5]),
        ({"count": 99}, [6, 5, 4, 3, 2, 1, 0]),
        ({"order": "worst", "count": 3}, [5, 3, 6]),
        ({"order": "best", "count": 3}, [1, 4, 0]),  # of equal rewards the newest first
        ({"order": "worst", "count": 99}, [5, 3, 6, 4, 0, 1]),  # without the unscorable
        ({"outcome": "trained"}, [6, 4, 1, 0]),
        ({"outcome": "dropped"}, [3, 2]),
        ({"outcome": "dropped_stale"}, [3]),
        ({"version": 3}, [5, 3]),
        ({"version": 4}, [5, 4]),
        ({"prompt": "task/0"}, [6, 3, 0]),
        ({"outcome": "trained", "order": "worst", "prompt": "task/1", "count": 1}, [4]),
    ],
)
def test_query_finds_in_order(tmp_path: Path, query: dict[str, Any], sample_ids: list[int]) -> None:
    assert found(make_run(tmp_path, rows=ROWS), **query) == sample_ids


def test_what_became_of_a_trajectory_is_found_with_it(tmp_path: Path) -> None:
    first = find(make_run(tmp_path, rows=ROWS).trajectories, Query(outcome="dropped_stale"))[0]
    assert (first.outcome, first.batch_id, first.trained_version, first.staleness) == ("dropped_stale", 3, 9, 6)


@pytest.mark.parametrize("outcome", ["evaluation", "drop", "trained_", ""])
def test_unknown_outcome_is_refused_with_the_ones_there_are(outcome: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Query(outcome=outcome)
    assert "there are trained, dropped, dropped_stale, dropped_incomplete_group, dropped_unscorable" in str(
        caught.value
    )


def test_outcomes_are_counted(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rows=ROWS)
    counts = {"trained": 4, "dropped_unscorable": 1, "dropped_stale": 1, "evaluation": 1}
    assert outcomes(run_dir.trajectories) == counts


def test_run_that_is_still_writing_can_be_read(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rows=ROWS)
    (run_dir.trajectories / ".part-000004.parquet.77.tmp").write_bytes(b"half")
    (run_dir.trajectories / "part-000001.parquet").unlink()  # as if taken away in between
    assert found(run_dir, count=99) == [6, 5, 4, 1, 0]


def test_archive_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert find(tmp_path / "trajectories", Query()) == []
    assert find(tmp_path / "trajectories", Query(order="best", version=3)) == []


# Reading


def test_segments_are_what_each_party_wrote(tmp_path: Path) -> None:
    reader = Reader(save_tokenizer(tmp_path))
    trajectory = make_rollout([1, 2], [3, 1, 2, 0])
    assert reader.segments(trajectory) == [("prompt", "ab"), ("sampled", "cab<end>")]
    two_turns = make_trajectory(token_ids=make_trajectory().token_ids % 4)  # 1 2 | 3 0 | 1 | 2
    assert reader.segments(two_turns) == [
        ("prompt", "ab"),
        ("sampled", "c<end>"),
        ("observation", "a"),
        ("sampled", "b"),
    ]


def test_segments_of_odd_trajectories(tmp_path: Path) -> None:
    reader = Reader(save_tokenizer(tmp_path))
    assert reader.segments(make_rollout([1], [])) == [("prompt", "a")]
    assert reader.segments(make_rollout([], [1])) == [("sampled", "a")]
    assert reader.segments(make_rollout([], [])) == []


def test_space_before_a_word_is_kept_where_turns_meet(tmp_path: Path) -> None:
    reader = Reader(save_tokenizer(tmp_path, decoders.Metaspace()))
    assert reader.decode([4]) == "d"  # at the start of a text the tokenizer drops the space
    assert reader.segments(make_rollout([1], [4, 4])) == [("prompt", "a"), ("sampled", " d d")]


def test_character_split_between_prompt_and_response_is_no_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"Ã": 0, "©": 1, "x": 2}, unk_token="x"))
    tokenizer.decoder = decoders.ByteLevel()  # the two bytes of é
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    reader = Reader(tmp_path)
    assert reader.decode([0, 1]) == "é"
    assert reader.segments(make_rollout([2, 0], [1, 2])) == [("prompt", "x\ufffd"), ("sampled", "\ufffdx")]


def test_without_tokenizer_numbers_are_shown(tmp_path: Path) -> None:
    assert Reader(tmp_path).segments(make_rollout([11, 12], [13])) == [("prompt", "<11><12>"), ("sampled", "<13>")]


def test_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        Reader(tmp_path)


def test_headline_has_the_facts() -> None:
    archived = Rollout(trajectory=make_trajectory(), outcome="trained", batch_id=30, trained_version=6)
    assert headline(archived) == (
        "sample 7, prompt sort-digits/17, trained in batch 30\n"
        "reward 0.500, 2 + 3 tokens, ended by length, versions 3 to 4, staleness 3, 1.5 s to generate, solved 1"
    )
    lost = make_rollout([1], [], reward=None, error="time limit of 10 s", metrics={})
    text = headline(Rollout(trajectory=lost, outcome="dropped_unscorable", batch_id=-1, trained_version=6))
    assert text.endswith(
        "unscorable, 1 + 0 tokens, ended by stop, nothing sampled, 1.5 s to generate\ntime limit of 10 s"
    )
    assert "dropped unscorable\n" in text


# Showing


def shown(run_dir: RunDir, query: Query, *, as_json: bool = False, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, soft_wrap=True, highlight=False)
    show(run_dir, query, console, as_json=as_json)
    return out.getvalue()


def test_page_marks_what_was_sampled(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rows=ROWS)
    text = shown(run_dir, Query(count=1))
    assert "sample 6, prompt task/0, trained in batch 6" in text
    assert "ab⟦c<end>⟧" in text
    assert "1 shown; archived so far: 4 trained, 1 dropped unscorable" in text
    assert "⟦" not in shown(run_dir, Query(count=1), terminal=True)  # there it has a colour


def test_text_cannot_command_the_terminal(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, rows=[(make_rollout([1], [5]), "trained")])
    assert "\x1b[2J" not in shown(run_dir, Query(), terminal=True)
    assert "\\x1b[2J" in shown(run_dir, Query())
    assert printable("a\tb\nc\r\x07é\ud800") == "a\tb\nc\\r\\x07é\\ud800"


def test_markup_in_text_is_shown_as_it_is(tmp_path: Path) -> None:
    rows = [(make_rollout([1], [2], prompt_id="[bold]x[/nope]"), "trained")]
    assert "[bold]x[/nope]" in shown(make_run(tmp_path, rows=rows), Query())


def test_json_is_one_object_a_line_and_nothing_else(tmp_path: Path) -> None:
    objects = [
        json.loads(line) for line in shown(make_run(tmp_path, rows=ROWS), Query(count=2), as_json=True).splitlines()
    ]
    assert [item["sample_id"] for item in objects] == [6, 5]
    last = objects[0]
    assert (last["prompt"], last["response"], last["reward"]) == ("ab", "c<end>", 0.25)
    assert (last["outcome"], last["batch_id"], last["staleness"], last["oldest_version"]) == ("trained", 6, 3, 6)


def test_json_of_turns_has_their_order(tmp_path: Path) -> None:
    two_turns = make_trajectory(token_ids=make_trajectory().token_ids % 4)
    archived = Rollout(trajectory=two_turns, outcome="trained", batch_id=0, trained_version=4)
    record = to_json(archived, Reader(save_tokenizer(tmp_path)))
    assert record["turns"] == [
        {"role": "sampled", "text": "c<end>"},
        {"role": "observation", "text": "a"},
        {"role": "sampled", "text": "b"},
    ]
    assert record["response"] == "c<end>b"
    assert json.loads(json.dumps(record)) == record


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        shown(RunDir(tmp_path), Query())


def test_turn_without_tokens_does_not_disturb_the_text(tmp_path: Path) -> None:
    reader = Reader(save_tokenizer(tmp_path))
    turns = (
        Turn(start=1, stop=1, finish_reason=FinishReason.STOP),
        Turn(start=2, stop=3, finish_reason=FinishReason.STOP),
    )
    base = make_rollout([1, 2], [3])
    trajectory = make_rollout([1, 2], [3], turns=turns, loss_mask=base.loss_mask)
    assert reader.segments(trajectory) == [("prompt", "a"), ("observation", "b"), ("sampled", "c")]
