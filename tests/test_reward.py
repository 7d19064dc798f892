"""Scoring functions, and the processes they run in."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from actors.reward import RewardPool, Score
from actors.scoring import exact_match, last_number, number_match, read_result
from common.config import DataConfig, EvaluationConfig
from common.errors import ConfigError
from common.types import Prompt
from tests.fakes import make_prompt

USER_MODULE = """
    import os, signal, subprocess, sys, time

    def behave(response, answer, row):
        if response == "loop":
            while True:
                pass
        if response == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                pass
        if response == "raise":
            raise ValueError("cannot read this")
        if response == "exit":
            os._exit(3)
        if response == "polite exit":
            sys.exit(0)
        if response == "wait":
            while not os.path.exists(row["note"]):
                time.sleep(0.01)
        if response == "slow":
            time.sleep(0.05)
        if response == "parent":
            child = subprocess.Popen(["sleep", "600"])
            with open(row["note"], "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        return 1.0

    def noisy(response, answer, row):
        print("x" * 100_000)
        sys.stdout.write("unfinished")
        os.write(1, b"raw")
        subprocess.run(["echo", "from a child"], check=True)
        return float(sys.stdin.read() == "")

    def show(response, answer, row):
        with open(row["note"], "w", encoding="utf-8") as file:
            file.write(repr((response, answer, row)))
        return 1

    def measured(response, answer, row):
        return 0.5, {"words": len(response.split())}

    VALUES = {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "1.0", "true": True, "int": 2}
    VALUES["list"] = [1]

    def value(response, answer, row):
        return VALUES[response]

    def modules(response, answer, row):
        return float(not {"torch", "ray", "vllm", "numpy", "transformers"} & set(sys.modules))

    NOT_A_FUNCTION = 5
"""


@pytest.fixture(scope="module")
def import_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "my_rewards_module.py").write_text(textwrap.dedent(USER_MODULE), encoding="utf-8")
    return str(folder)


def with_pool(
    function: str,
    import_dir: str,
    use: Callable[[RewardPool], Awaitable[Any]],
    *,
    processes: int = 1,
    time_limit_s: float = 30.0,
) -> Any:
    """What `use` returns; afterwards no process of the pool lives."""

    async def scenario() -> Any:
        pool = RewardPool(function, import_dir, processes=processes, time_limit_s=time_limit_s)
        await pool.start()
        try:
            result = await use(pool)
            pids = pool.pids
        finally:
            await pool.close()
        assert not [pid for pid in pids if alive(pid)]
        assert pool.pids == []
        return result

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_death(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


def test_hanging_failing_and_ending_calls_leave_a_whole_pool_and_right_results(import_dir: str) -> None:
    """F-22, as it stands there."""
    responses = [name for name in ("loop", "stubborn", "raise", "exit", "fine") for _ in range(10)]
    random.Random(0).shuffle(responses)

    async def use(pool: RewardPool) -> list[Score]:
        first = set(pool.pids)
        scores = await asyncio.gather(*(pool.score(make_prompt(), r, i) for i, r in enumerate(responses)))
        assert await pool.score(make_prompt(), "fine", 99) == Score(reward=1.0)
        assert await pool.score(make_prompt(), "fine", 99) == Score(reward=1.0)
        assert len(pool.pids) == 2
        assert not first & set(pool.pids)
        assert not [pid for pid in first if alive(pid)]
        assert pool.replaced == 30
        return scores

    scores = with_pool("my_rewards_module:behave", import_dir, use, processes=2, time_limit_s=1.0)
    reasons = {"loop": "reward.time_limit_s = 1", "stubborn": "reward.time_limit_s = 1", "exit": "ended with status 3"}
    reasons["raise"] = "ValueError: cannot read this"
    for number, (response, score) in enumerate(zip(responses, scores, strict=True)):
        if response == "fine":
            assert score == Score(reward=1.0)
        else:
            assert score.reward is None
            assert score.error.startswith(f"sample {number}: my_rewards_module:behave: ")
            assert reasons[response] in score.error
    assert Counter(score.reward for score in scores) == {1.0: 10, None: 40}


def test_what_a_hanging_call_has_started_dies_with_it(import_dir: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def use(pool: RewardPool) -> None:
        score = await pool.score(make_prompt(row={"note": str(note)}), "parent", 0)
        assert score.reward is None
        wait_for_death(int(note.read_text()))

    with_pool("my_rewards_module:behave", import_dir, use, time_limit_s=1.0)


def test_a_polite_exit_is_an_error_and_costs_no_process(import_dir: str) -> None:
    async def use(pool: RewardPool) -> None:
        pids = pool.pids
        score = await pool.score(make_prompt(), "polite exit", 4)
        assert (score.reward, "SystemExit" in score.error) == (None, True)
        assert pool.pids == pids

    with_pool("my_rewards_module:behave", import_dir, use)


def test_a_process_that_dies_between_calls_is_replaced_without_losing_a_sample(import_dir: str) -> None:
    async def use(pool: RewardPool) -> None:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        while pool.pids:
            await asyncio.sleep(0.01)
        assert await pool.score(make_prompt(), "fine", 0) == Score(reward=1.0)
        assert pool.pids != [pid]

    with_pool("my_rewards_module:behave", import_dir, use)


def test_a_cancelled_call_leaves_a_usable_pool(import_dir: str) -> None:
    async def use(pool: RewardPool) -> None:
        for wait_s in (0.0, 0.05, 0.0, 0.01):  # also while the process is being replaced
            task = asyncio.ensure_future(pool.score(make_prompt(), "loop", 0))
            await asyncio.sleep(wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
        assert await pool.score(make_prompt(), "fine", 0) == Score(reward=1.0)

    with_pool("my_rewards_module:behave", import_dir, use)


@pytest.mark.parametrize("number", [0, 3], ids=["the one at work", "one behind it"])
def test_a_cancelled_call_costs_those_sent_with_it_nothing(import_dir: str, number: int) -> None:
    async def use(pool: RewardPool) -> None:
        await pool.score(make_prompt(), "fine", 0)  # such short calls are sent together
        responses = ["loop", "fine", "fine", "fine", "fine"]
        tasks = [asyncio.ensure_future(pool.score(make_prompt(), r, i)) for i, r in enumerate(responses)]
        await asyncio.sleep(0.1)
        tasks[number].cancel()
        scores = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(scores.pop(number), asyncio.CancelledError)
        assert scores[-3:] == [Score(reward=1.0)] * 3
        assert pool.replaced == 1

    with_pool("my_rewards_module:behave", import_dir, use, time_limit_s=2.0)


def test_closing_a_pool_that_is_starting_cancels_the_start(import_dir: str) -> None:
    async def scenario() -> None:
        pool = RewardPool("my_rewards_module:behave", import_dir, processes=2, time_limit_s=30.0)
        starting = asyncio.ensure_future(pool.start())
        while len(pool.pids) < 2:
            await asyncio.sleep(0.001)
        pids = pool.pids
        await pool.close()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled()
        assert not any(alive(pid) for pid in pids)

    asyncio.run(scenario())


def test_closing_a_pool_cancels_its_calls(import_dir: str) -> None:
    async def scenario() -> None:
        pool = RewardPool("my_rewards_module:behave", import_dir, processes=1, time_limit_s=30.0)
        await pool.start()
        calls = [asyncio.ensure_future(pool.score(make_prompt(), "loop", number)) for number in range(3)]
        await asyncio.sleep(0.1)
        await pool.close()
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
        assert all(call.cancelled() for call in calls)

    asyncio.run(scenario())


def test_a_long_call_keeps_nothing_from_other_processes(import_dir: str, tmp_path: Path) -> None:
    prompt = make_prompt(row={"note": str(tmp_path / "go on")})

    async def use(pool: RewardPool) -> None:
        await asyncio.gather(*(pool.score(prompt, "slow", 0) for _ in range(2)))
        waits = asyncio.ensure_future(pool.score(prompt, "wait", 0))
        others = await asyncio.gather(*(pool.score(prompt, "fine", 0) for _ in range(5)))
        assert others == [Score(reward=1.0)] * 5
        assert not waits.done()
        (tmp_path / "go on").touch()
        assert await waits == Score(reward=1.0)

    with_pool("my_rewards_module:behave", import_dir, use, processes=2)


def test_output_of_a_scoring_function_does_not_disturb_the_messages(import_dir: str) -> None:
    async def use(pool: RewardPool) -> None:
        for number in range(3):
            assert await pool.score(make_prompt(), "x", number) == Score(reward=1.0)

    with_pool("my_rewards_module:noisy", import_dir, use)


@pytest.mark.parametrize(
    ("response", "reward", "error"),
    [
        ("none", None, "returned None, which is not a number"),
        ("nan", None, "not finite"),
        ("inf", None, "not finite"),
        ("text", None, "returned '1.0', which is not a number"),
        ("list", None, "not a number"),
        ("true", 1.0, ""),
        ("int", 2.0, ""),
        ("missing", None, "KeyError: 'missing'"),
    ],
)
def test_only_a_finite_number_is_a_reward(import_dir: str, response: str, reward: float | None, error: str) -> None:
    """F-21: None, NaN and infinity are unscorable, not 0."""
    score = with_pool("my_rewards_module:value", import_dir, lambda pool: pool.score(make_prompt(), response, 7))
    assert score.reward == reward
    assert error in score.error
    assert (score.error == "") == (reward is not None)


def test_a_function_sees_response_answer_row_and_prompt_unchanged(import_dir: str, tmp_path: Path) -> None:
    """F-30: emoji and right-to-left text arrive as they are."""
    text, note = "מה השעה 🕰️? \u2028", str(tmp_path / "seen")
    chat = make_prompt("", None, messages=({"role": "user", "content": text},), row={"note": note, "level": 3})

    async def use(pool: RewardPool) -> list[str]:
        plain = make_prompt(text, "🕛", row={"note": note, "level": [1, None]})
        seen = []
        for prompt in (plain, chat):
            assert await pool.score(prompt, text, 0) == Score(reward=1.0)
            seen.append(Path(note).read_text(encoding="utf-8"))
        return seen

    plain, messages = with_pool("my_rewards_module:show", import_dir, use)
    assert plain == repr((text, "🕛", {"prompt": text, "note": note, "level": [1, None]}))
    row = {"prompt": [{"role": "user", "content": text}], "note": note, "level": 3}
    assert messages == repr((text, None, row))


def test_a_function_may_give_metrics(import_dir: str) -> None:
    score = with_pool("my_rewards_module:measured", import_dir, lambda pool: pool.score(make_prompt(), "a b c", 0))
    assert score == Score(reward=0.5, metrics={"words": 3.0})


def test_a_row_that_cannot_be_sent_is_unscorable(import_dir: str) -> None:
    score = with_pool(
        "my_rewards_module:measured", import_dir, lambda pool: pool.score(make_prompt(row={"n": 2**70}), "", 5)
    )
    assert score.reward is None
    assert score.error.startswith("sample 5: its row cannot be sent")


def test_a_long_response_goes_through(import_dir: str) -> None:
    response = "word " * 400_000
    score = with_pool("my_rewards_module:measured", import_dir, lambda pool: pool.score(make_prompt(), response, 0))
    assert score.metrics == {"words": 400_000.0}


def test_a_scoring_process_loads_no_heavy_package(import_dir: str) -> None:
    score = with_pool("my_rewards_module:modules", import_dir, lambda pool: pool.score(make_prompt(), "", 0))
    assert score == Score(reward=1.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("my_rewards_module:missing", r"reward\.function = 'my_rewards_module:missing'.*has no 'missing'"),
        ("absent_rewards:f", "no module 'absent_rewards'"),
        ("my_rewards_module:NOT_A_FUNCTION", "cannot be called"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_config_error_at_start(
    import_dir: str, function: str, message: str
) -> None:
    async def start() -> None:
        pool = RewardPool(function, import_dir, processes=2, time_limit_s=1)
        try:
            with pytest.raises(ConfigError, match=message):
                await pool.start()
        finally:
            assert pool.pids == []

    asyncio.run(start())


def test_an_unknown_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean exact-match"):
        RewardPool("exact_match", "", processes=1, time_limit_s=1)


def test_scoring_processes_die_with_their_parent_even_in_an_endless_loop(import_dir: str, tmp_path: Path) -> None:
    code = f"""
        import asyncio, os, signal, sys
        from actors.reward import RewardPool
        from common.types import Prompt
        async def main():
            pool = RewardPool("my_rewards_module:behave", {import_dir!r}, processes=2, time_limit_s=600)
            await pool.start()
            task = asyncio.ensure_future(pool.score(Prompt(prompt_id="", epoch=0), "stubborn", 0))
            await asyncio.sleep(0.2)
            print(*pool.pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, text=True, timeout=60
    )
    pids = [int(word) for word in result.stdout.split()]
    assert len(pids) == 2, result.stderr
    for pid in pids:
        wait_for_death(pid)


# Built-in scoring functions


def test_exact_match_ignores_white_space_around_and_nothing_else() -> None:
    assert exact_match(" 1257\n", "1257", {}) == 1.0
    assert exact_match("1257.", "1257", {}) == 0.0
    assert exact_match("12 57", "1257", {}) == 0.0
    with pytest.raises(ValueError, match=r"data\.answer_column"):
        exact_match("1257", None, {})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 12.", "12"),
        ("3 + 4 = 7, so 7", "7"),
        ("1,000,000", "1000000"),
        ("1,00", "0"),
        ("2.50 euros", "2.5"),
        ("-4", "-4"),
        ("−4", "-4"),
        ("10-4", "4"),
        ("x = -4", "-4"),
        ("1.5e3", "1500"),
        ("#### 18", "18"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


def test_number_match_compares_values() -> None:
    assert number_match("so it is 1,000.0", "1000", {}) == 1.0
    assert number_match("12 or 13", "12", {}) == 0.0
    assert number_match("no idea", "12", {}) == 0.0
    assert number_match("7", "6 + 1 #### 7", {}) == 1.0
    with pytest.raises(ValueError, match="holds no number"):
        number_match("12", "none", {})


def test_numbers_of_other_packages_are_rewards() -> None:
    import numpy as np

    assert read_result(np.float32(0.5)) == (0.5, {})
    assert read_result(np.int64(2)) == (2.0, {})
    assert read_result((Decimal("0.25"), {"a": np.bool_(True)})) == (0.25, {"a": 1.0})
    for wrong in (np.zeros(2), math.nan, (1.0, {"a": math.inf}), (1.0, 2.0)):
        with pytest.raises((TypeError, ValueError)):
            read_result(wrong)


def test_reasoning_gym_scores_its_own_rows() -> None:
    pytest.importorskip("reasoning_gym")
    from buffer.sources import load_rows

    data = DataConfig(source="reasoning-gym:countdown", num_rows=3, options={"min_numbers": 3, "max_numbers": 3})
    rows = load_rows(data, seed=0, split="train", evaluation=EvaluationConfig(num_prompts=0))

    async def use(pool: RewardPool) -> None:
        for index, row in enumerate(rows):
            assert (await pool.score(row, f" {row.answer}\n", index)).reward == 1.0
            assert (await pool.score(row, "no idea", index)).reward < 0.5  # type: ignore[operator]
        foreign = await pool.score(Prompt(prompt_id="", epoch=0, text="x", answer="1"), "1", 9)
        assert "reasoning-gym:NAME" in foreign.error

    with_pool("reasoning-gym", "", use)
