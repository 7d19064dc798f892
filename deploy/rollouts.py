"""Reads a run's archive, while the run goes on too: which trajectories there are, and what the model wrote in them."""

from __future__ import annotations

import heapq
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer

from buffer.archive import OUTCOMES, part_files, read_part
from common.columns import from_table
from common.config_load import nearest
from common.errors import ConfigError, DataError
from common.types import Trajectory
from deploy.run_dir import RunDir

Order = Literal["newest", "worst", "best"]
Role = Literal["prompt", "sampled", "observation"]
STYLES: dict[Role, str] = {"prompt": "dim", "sampled": "bold green", "observation": "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Which trajectories to show.

    Raises:
        ConfigError: there is no such outcome.
    """

    count: int = 5
    order: Order = "newest"  # worst and best are by reward and leave out the unscorable
    version: int | None = None  # with a token sampled under this weight version
    outcome: str | None = None  # one of `OUTCOMES`, or `dropped` for all of those
    prompt: str | None = None  # prompt id

    def __post_init__(self) -> None:
        valid = [OUTCOMES[0], "dropped", *OUTCOMES[1:]]
        if self.outcome is not None and self.outcome not in valid:
            hint = nearest(self.outcome, valid)
            raise ConfigError(f"--outcome {self.outcome}: there is no such outcome{hint}; there are {', '.join(valid)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """An archived trajectory and what became of it."""

    trajectory: Trajectory
    outcome: str
    batch_id: int  # -1: none
    trained_version: int  # learner's weight version when it was trained on or dropped

    @property
    def staleness(self) -> int:
        """Of its oldest token, when it was trained on or dropped."""
        return self.trajectory.staleness(self.trained_version)


def find(folder: Path, query: Query) -> list[Rollout]:
    """Matching trajectories in the order asked for; newest means the last that came to an end."""
    chosen: list[tuple[float, int, int, Path]] = []  # reward, part, row
    columns = ["reward", "outcome", "prompt_id", *(["weight_versions"] if query.version is not None else [])]
    for number, path in reversed(list(enumerate(part_files(folder)))):
        table = read_part(path, columns)
        if table is None:
            continue
        rewards = table["reward"].to_pylist()
        rows = [
            int(row)
            for row in np.flatnonzero(_matches(table, query))
            if query.order == "newest" or rewards[row] is not None
        ]
        found = [(0.0 if query.order == "newest" else rewards[row], number, row, path) for row in rows]
        if query.order == "newest":
            chosen += found[::-1]
            if len(chosen) >= query.count:
                break
        else:
            # of equal rewards, the newest first
            sign = 1 if query.order == "best" else -1
            chosen = heapq.nlargest(query.count, [*chosen, *found], key=lambda item: (sign * item[0], item[1], item[2]))
    return list(_load([(path, row) for _, _, row, path in chosen[: query.count]]))


def outcomes(folder: Path) -> Counter[str]:
    """Number of archived trajectories by outcome."""
    counts: Counter[str] = Counter()
    for path in part_files(folder):
        table = read_part(path, ["outcome"])
        if table is not None:
            counts.update(table["outcome"].to_pylist())
    return counts


class Reader:
    """Turns tokens into text with the tokenizer that the run kept.

    Raises:
        DataError: the tokenizer's file is damaged. Where there is none, token numbers are shown instead.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None
        if path.exists():
            try:
                self._tokenizer = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise DataError(f"tokenizer {path} cannot be read: {error}; copy it from the model's folder") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"<{token}>" for token in token_ids)
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False)

    def segments(self, trajectory: Trajectory) -> list[tuple[Role, str]]:
        """Text of prompt, turns and observations in order. Each is what it adds to the text before it."""
        spans: list[tuple[Role, int]] = []
        for turn in trajectory.turns:
            spans += [("observation" if spans else "prompt", turn.start), ("sampled", turn.stop)]
        spans.append(("observation" if spans else "prompt", len(trajectory.token_ids)))
        result: list[tuple[Role, str]] = []
        before, start = "", 0
        for role, stop in spans:
            if stop == start:
                continue
            whole = self.decode(trajectory.token_ids[:stop].tolist())
            # a character whose bytes are split between the two is not whole in `before`: then decode on its own
            added = (
                whole[len(before) :]
                if whole.startswith(before)
                else self.decode(trajectory.token_ids[start:stop].tolist())
            )
            result.append((role, added))
            before, start = whole, stop
        return result


def to_json(rollout: Rollout, reader: Reader) -> dict[str, Any]:
    """Everything about a rollout in plain values; `text` is the whole, `response` what the model wrote."""
    trajectory = rollout.trajectory
    segments = reader.segments(trajectory)
    return {
        "sample_id": trajectory.sample_id,
        "group_id": trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "epoch": trajectory.epoch,
        "attempt": trajectory.attempt,
        "outcome": rollout.outcome,
        "batch_id": rollout.batch_id,
        "trained_version": rollout.trained_version,
        "oldest_version": trajectory.oldest_version,
        "newest_version": trajectory.newest_version,
        "staleness": rollout.staleness,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "metrics": dict(trajectory.metrics),
        "finish_reason": trajectory.finish_reason.value,
        "num_prompt_tokens": trajectory.num_prompt_tokens,
        "num_sampled_tokens": trajectory.num_sampled,
        "generate_s": trajectory.timings.generate_s,
        "prompt": "".join(text for role, text in segments[:1] if role == "prompt"),
        "response": "".join(text for role, text in segments if role == "sampled"),
        "turns": [
            {"role": role, "text": text}
            for role, text in segments[1 if segments and segments[0][0] == "prompt" else 0 :]
        ],
    }


def headline(rollout: Rollout) -> str:
    """The facts of a rollout in two lines."""
    trajectory = rollout.trajectory
    reward = "unscorable" if trajectory.reward is None else f"reward {trajectory.reward:.3f}"
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
    facts = [
        reward,
        f"{trajectory.num_prompt_tokens} + {trajectory.num_sampled} tokens",
        f"ended by {trajectory.finish_reason.value}",
        f"{versions}, staleness {rollout.staleness}" if trajectory.num_sampled else "nothing sampled",
        f"{trajectory.timings.generate_s:.2g} s to generate",
    ]
    facts += [f"{name} {value:.4g}" for name, value in trajectory.metrics.items()]
    batch = f" in batch {rollout.batch_id}" if rollout.batch_id >= 0 else ""
    place = f"sample {trajectory.sample_id}, prompt {trajectory.prompt_id}, {rollout.outcome.replace('_', ' ')}{batch}"
    error = f"\n{trajectory.error}" if trajectory.error else ""
    return f"{place}\n{', '.join(facts)}{error}"


def show(run_dir: RunDir, query: Query, console: Console, *, as_json: bool = False) -> int:
    """Print what matches; returns how many that were.

    Raises:
        ConfigError: this is no run directory.
        DataError: the tokenizer is damaged.
    """
    run_dir.config()  # refuses what is no run
    reader = Reader(run_dir.tokenizer)
    rollouts = find(run_dir.trajectories, query)
    for rollout in rollouts:
        if as_json:
            print(json.dumps(to_json(rollout, reader), ensure_ascii=False), file=console.file)
        else:
            console.print(_page(rollout, reader, color=console.is_terminal and not console.no_color))
    if not as_json:
        counts = outcomes(run_dir.trajectories).most_common()
        archived = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts)
        console.print(Text(f"{len(rollouts)} shown; archived so far: {archived or 'nothing'}", "dim"))
    return len(rollouts)


def _page(rollout: Rollout, reader: Reader, *, color: bool) -> Text:
    text = Text()
    place, _, facts = headline(rollout).partition("\n")
    text.append(f"{place}\n", "bold")
    text.append(f"{facts}\n")
    for role, segment in reader.segments(rollout.trajectory):
        shown = printable(segment)
        text.append(f"⟦{shown}⟧" if role == "sampled" and not color else shown, STYLES[role])
    return text.append("\n")


def printable(text: str) -> str:
    """Text without characters that would command the terminal; they are shown as escapes."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs")
        else char.encode("unicode_escape").decode()
        for char in text
    )


def _matches(table: pa.Table, query: Query) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """One truth value a row."""
    keep = np.ones(table.num_rows, np.bool_)
    if query.outcome is not None:
        wanted = [
            name == query.outcome or name.startswith(f"{query.outcome}_") for name in table["outcome"].to_pylist()
        ]
        keep &= np.array(wanted, np.bool_)
    if query.prompt is not None:
        keep &= np.array([prompt == query.prompt for prompt in table["prompt_id"].to_pylist()], np.bool_)
    if query.version is not None:
        lists = table["weight_versions"].combine_chunks()
        rows = pc.list_parent_indices(lists).to_numpy()
        hits = np.zeros(table.num_rows, np.bool_)
        hits[rows[lists.flatten().to_numpy() == query.version]] = True
        keep &= hits
    return keep


def _load(places: Sequence[tuple[Path, int]]) -> Iterator[Rollout]:
    """Rows by part and number, in the order given."""
    tables = {path: read_part(path) for path in {path for path, _ in places}}
    for path, row in places:
        table = tables[path]
        if table is not None:
            one = table.slice(row, 1)
            yield Rollout(
                trajectory=from_table(one)[0],
                outcome=one["outcome"][0].as_py(),
                batch_id=one["batch_id"][0].as_py(),
                trained_version=one["trained_version"][0].as_py(),
            )
