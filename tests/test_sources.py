"""Data sources: what becomes a prompt, what is refused, and what is held out."""

from __future__ import annotations

import codecs
import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffer.row_files import jsonable
from buffer.rows import content_hash
from buffer.sources import RowSource, load_rows
from common.config import DataConfig, EvaluationConfig
from common.errors import ConfigError, DataError

NO_EVALUATION = EvaluationConfig(num_prompts=0)
ODD_TEXT = "מה השעה 🕰️? \u2028 tab\tend"


def load(source: Path | str, *, split: Any = "train", num_prompts: int = 0, seed: int = 0, **data: Any) -> RowSource:
    evaluation = EvaluationConfig(num_prompts=num_prompts)
    return load_rows(DataConfig(source=str(source), **data), seed=seed, split=split, evaluation=evaluation)


def write_lines(path: Path, *lines: str, ends: str = "\n", start: bytes = b"") -> Path:
    path.write_bytes(start + "".join(line + ends for line in lines).encode())
    return path


def odd_file(folder: Path) -> Path:
    """The file of case F-30: lines 1 and 8 are good, 2 is blank, the rest is malformed."""
    return write_lines(
        folder / "odd.jsonl",
        '{"prompt": "2+2?", "answer": "4"}',
        "",
        '{"prompt": "broken',
        "[]",
        '{"question": "?"}',
        '{"prompt": null}',
        '{"prompt": ""}',
        json.dumps({"prompt": ODD_TEXT, "answer": "🕛", "level": 3}, ensure_ascii=False),
        '{"prompt": "half \\ud83d"}',
    )


def test_strict_mode_names_file_and_line_of_the_first_malformed_row(tmp_path: Path) -> None:
    """F-30."""
    path = odd_file(tmp_path)
    with pytest.raises(DataError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: not JSON: ")
    assert "data.on_bad_row" in str(raised.value)


def test_skip_mode_counts_and_keeps_the_good_rows_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F-30. The blank line is no row; half a surrogate pair is a malformed one."""
    path = odd_file(tmp_path)
    with caplog.at_level(logging.WARNING):
        rows = load(path, on_bad_row="skip")
    assert (rows.read, rows.kept, rows.skipped) == (8, 2, 6)
    assert rows.left_out == ", 6 skipped as malformed"
    assert [row.prompt_id for row in rows] == ["odd.jsonl:1", "odd.jsonl:8"]
    assert rows[1].text == ODD_TEXT
    assert (rows[1].answer, rows[1].row) == ("🕛", {"level": 3})
    assert "8 rows read, 2 kept, 6 skipped" in caplog.text
    assert f"{path}:3" in caplog.text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "a JSON object is wanted, not list"),
        ('{"question": "?"}', "no column 'prompt' (but question): data.prompt_column"),
        ('{"prompt": null}', "is null"),
        ('{"prompt": " \\n"}', "is empty"),
        ('{"prompt": 7}', "is int"),
        ('{"prompt": []}', "is an empty list"),
        ('{"prompt": ["hi"]}', "message 0"),
        ('{"prompt": [{"role": "user"}]}', "must have role and content"),
        ('{"prompt": [{"role": "user", "content": 5}]}', "must have role and content"),
        ('{"prompt": "x", "note": "\\udc00"}', "surrogate"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_row_is_explained(tmp_path: Path, line: str, reason: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(DataError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert reason in str(raised.value)


def test_bytes_that_are_not_utf8_are_a_malformed_row(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        load(path)


def test_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    """F-30."""
    lines = ['{"prompt": "2+2?", "answer": "4"}', json.dumps({"prompt": ODD_TEXT}, ensure_ascii=False)]
    plain = load(write_lines(tmp_path / "a.jsonl", *lines))
    windows = load(write_lines(tmp_path / "b.jsonl", *lines, ends="\r\n", start=codecs.BOM_UTF8))
    assert [(row.text, row.answer) for row in plain] == [(row.text, row.answer) for row in windows]
    assert len(plain) == 2


def test_messages_and_other_columns_names(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write_lines(tmp_path / "chat.jsonl", json.dumps({"turns": chat, "gold": 5, "prompt": "unused"}))
    (row,) = load(path, prompt_column="turns", answer_column="gold")
    assert row.messages == tuple(chat)
    assert (row.text, row.answer, row.row, row.epoch) == ("", "5", {"prompt": "unused"}, 0)


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5"), (2.5, "2.5"), (None, None), (["a", "b"], '["a", "b"]'), ("", "")]
)
def test_answers_become_text(tmp_path: Path, value: Any, text: str | None) -> None:
    path = write_lines(tmp_path / "rows.jsonl", json.dumps({"prompt": "x", "answer": value}))
    assert load(path)[0].answer == text


@pytest.mark.parametrize("content", [b"", b"\n\n", codecs.BOM_UTF8])
def test_a_file_without_rows_is_an_error(tmp_path: Path, content: bytes) -> None:
    """F-23: empty data."""
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="no usable row"):
        load(path)


def test_a_file_whose_rows_were_all_skipped_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bad.jsonl", "{}", "[]")
    with pytest.raises(DataError, match=r"2 read, 2 skipped"):
        load(path, on_bad_row="skip")


def test_missing_files_and_unknown_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"data\.csv.*\.parquet"):
        load("data.csv")
    with pytest.raises(ConfigError, match="did you mean sort-digits"):
        load("task:sort-digit")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "folder.jsonl")


def test_parquet_rows_text_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    day = datetime.date(2024, 2, 29)
    pq.write_table(pa.table({"prompt": ["one", ODD_TEXT], "answer": [1, None], "day": [day, day]}), path)
    rows = load(path)
    assert [row.prompt_id for row in rows] == ["rows.parquet:1", "rows.parquet:2"]
    assert [(row.text, row.answer) for row in rows] == [("one", "1"), (ODD_TEXT, None)]
    assert rows[0].row == {"day": "2024-02-29"}

    # Tables give every message the same fields: those that are null are not the message's.
    chat = [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Yes?", "name": "bot"}]
    pq.write_table(pa.table({"prompt": [chat]}), path)
    assert load(path)[0].messages == ({"role": "user", "content": "Hi"}, dict(chat[1]))


def test_parquet_problems_name_the_file_and_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"no table")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet"):
        load(path)
    pq.write_table(pa.table({"prompt": ["one", None]}), path)
    with pytest.raises(DataError, match=r"rows\.parquet:2: .*null"):
        load(path)
    assert load(path, on_bad_row="skip").skipped == 1


def test_a_function_of_the_users_gives_rows(tmp_path: Path) -> None:
    module = tmp_path / "my_rows_module.py"
    module.write_text(
        "import numpy as np\n"
        "def rows(count):\n    return ({'prompt': f'p{i}', 'answer': i, 'x': np.int64(i)} for i in range(count))\n"
        "def broken():\n    yield {'prompt': 'p'}\n    raise KeyError('gone')\n"
        "def wrong():\n    return ['text']\n"
    )

    def load_function(name: str, **data: Any) -> RowSource:
        config = DataConfig(source=f"python:my_rows_module:{name}", **data)
        return load_rows(config, seed=0, split="train", evaluation=NO_EVALUATION, import_dir=str(tmp_path))

    rows = load_function("rows", options={"count": 3})
    assert [(row.prompt_id, row.text, row.answer, row.row) for row in rows] == [
        (f"rows:{i + 1}", f"p{i}", str(i), {"x": i}) for i in range(3)
    ]
    with pytest.raises(DataError, match=r"KeyError: 'gone' \(.*my_rows_module\.py, line 6\)"):
        load_function("broken")
    with pytest.raises(DataError, match="mapping of columns is wanted, not str"):
        load_function("wrong")
    with pytest.raises(ConfigError, match=r"data\.source = 'my_rows_module:rowz'.*has no 'rowz'"):
        load_function("rowz")


def test_held_out_prompts_are_never_trained_on_even_when_rows_repeat(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{i % 50}", "n": i}) for i in range(150)]
    path = write_lines(tmp_path / "rows.jsonl", *lines)
    train, held_out = load(path, num_prompts=7), load(path, num_prompts=7, split="held_out")
    assert len(held_out) == len({row.text for row in held_out}) == 7
    assert len(train) == 150 - 7 * 3
    assert train.repeats == held_out.repeats == 7 * 2
    assert train.left_out == ", 14 left out because their prompts are held out already"
    assert {row.text for row in train} | {row.text for row in held_out} == {f"p{i}" for i in range(50)}
    assert not {row.text for row in train} & {row.text for row in held_out}


def test_what_is_held_out_depends_neither_on_order_nor_on_the_seed(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{i}"}) for i in range(100)]
    one = load(write_lines(tmp_path / "a.jsonl", *lines), num_prompts=9, split="held_out", seed=1)
    two = load(write_lines(tmp_path / "b.jsonl", *reversed(lines)), num_prompts=9, split="held_out", seed=2)
    assert [row.text for row in one] == [row.text for row in two]


def test_a_small_file_keeps_four_fifths_for_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps({"prompt": f"p{i}"}) for i in range(10)))
    held_out = load(path, num_prompts=128, split="held_out")
    assert (len(held_out), len(load(path, num_prompts=128))) == (2, 8)
    assert "evaluation.num_prompts = 128" in caplog.text


def test_without_evaluation_everything_is_trained_on(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps({"prompt": f"p{i}"}) for i in range(10)))
    assert len(load(path)) == 10
    assert len(load(path, split="held_out")) == 0


def test_an_evaluation_source_of_its_own_leaves_the_training_data_whole(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *(json.dumps({"prompt": f"p{i}"}) for i in range(10)))
    other = write_lines(tmp_path / "other.jsonl", *(json.dumps({"prompt": f"q{i}"}) for i in range(6)))
    evaluation = EvaluationConfig(num_prompts=4, source=str(other))
    config = DataConfig(source=str(path))
    train = load_rows(config, seed=0, split="train", evaluation=evaluation)
    held_out = load_rows(config, seed=0, split="held_out", evaluation=evaluation)
    assert len(train) == 10
    assert len(held_out) == 4
    assert {row.text for row in held_out} <= {f"q{i}" for i in range(6)}
    empty = EvaluationConfig(num_prompts=4, source=str(write_lines(tmp_path / "empty.jsonl")))
    with pytest.raises(DataError, match="no usable row"):
        load_rows(config, seed=0, split="held_out", evaluation=empty)


def test_built_in_tasks_have_two_parts() -> None:
    train = load("task:sort-digits", num_rows=100, num_prompts=20)
    held_out = load("task:sort-digits", num_rows=100, num_prompts=20, split="held_out")
    assert (len(train), len(held_out)) == (100, 20)
    assert train[17].prompt_id == "sort-digits/17"
    assert held_out[3].prompt_id == "sort-digits/held-out/3"
    assert train[17].answer == "".join(sorted(train[17].text[2:-1]))
    assert not {row.text for row in train} & {row.text for row in held_out}
    sums = load("task:digit-sums")
    assert sums[0].messages[-1]["role"] == "user"


def test_reasoning_gym_parts_do_not_overlap_and_the_seed_decides_the_training_rows() -> None:
    """A task with 81 prompts at most, so that a split by seed alone would overlap."""
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

    def part(split: str, seed: int) -> RowSource:
        source = "reasoning-gym:chain_sum"
        return load(source, split=split, num_prompts=4, num_rows=300, seed=seed, options=options)

    train, held_out = part("train", 0), part("held_out", 0)
    assert len(train) == 300
    assert 0 < len(held_out) <= 4
    assert not {content_hash(row) for row in train} & {content_hash(row) for row in held_out}
    assert [row.text for row in part("train", 0)] == [row.text for row in train]
    assert [row.text for row in part("train", 1)] != [row.text for row in train]
    assert [row.text for row in part("held_out", 1)] == [row.text for row in held_out]
    assert train[0].row["reasoning_gym"] == "chain_sum"
    assert json.loads(json.dumps(train[0].row)) == train[0].row


def test_reasoning_gym_mistakes_are_named() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        load("reasoning-gym:chain_sums")
    with pytest.raises(ConfigError, match=r"data\.options"):
        load("reasoning-gym:chain_sum", options={"max_digit": 1})


def test_plain_data_of_any_value() -> None:
    odd = {1: (1, {2.5}), "day": datetime.date(2024, 2, 29), "flag": True, "none": None}
    assert jsonable(odd) == {"1": [1, [2.5]], "day": "2024-02-29", "flag": True, "none": None}
