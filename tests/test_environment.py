"""Environments, by name and by import, and calls to them with a limit."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from actors.environment import (
    EnvironmentCaller,
    Episode,
    Step,
    StepTimeoutError,
    StuckEnvironmentError,
    make_caller,
    make_environment,
)
from common.config import EnvironmentConfig
from common.errors import ConfigError
from common.imports import describe, load_object
from common.types import Prompt
from tests.fakes import make_prompt


def test_single_turn_is_done_at_once() -> None:
    episode = make_environment(EnvironmentConfig()).start(make_prompt(), 0)
    assert episode.step("anything") == Step(done=True)


def test_second_try_pays_less_for_the_second_try() -> None:
    environment = make_environment(EnvironmentConfig(name="second-try", max_turns=2))
    prompt = make_prompt("s:21=", "12")
    assert environment.start(prompt, 0).step(" 12\n") == Step(
        done=True, reward=1.0, metrics={"tries": 1.0, "solved": 1.0}
    )
    late = environment.start(prompt, 0)
    assert late.step("21") == Step(done=False, observation="s:21=")
    assert late.step("12") == Step(done=True, reward=0.5, metrics={"tries": 2.0, "solved": 1.0})
    never = environment.start(prompt, 0)
    never.step("21")
    assert never.step("22") == Step(done=True, reward=0.0, metrics={"tries": 2.0, "solved": 0.0})


def test_second_try_answers_a_chat_with_a_message_of_its_own() -> None:
    prompt = make_prompt("", "12", messages=({"role": "user", "content": "sort 21"},))
    step = make_environment(EnvironmentConfig(name="second-try", max_turns=2)).start(prompt, 0).step("21")
    assert step.observation == "That is wrong. Try again."


def test_second_try_needs_an_answer_and_a_second_turn() -> None:
    with pytest.raises(ConfigError, match=r"environment\.max_turns = 1 leaves no second try"):
        make_environment(EnvironmentConfig(name="second-try"))
    environment = make_environment(EnvironmentConfig(name="second-try", max_turns=2))
    with pytest.raises(ValueError, match="test/0 has no answer"):
        environment.start(make_prompt(answer=None), 0)


def test_an_unknown_name_comes_with_the_nearest_or_all_valid_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean second-try"):
        make_environment(EnvironmentConfig(name="second_try"))
    with pytest.raises(ConfigError, match="choose single-turn, second-try, or MODULE:CLASS"):
        make_environment(EnvironmentConfig(name="xyz"))


def test_a_class_of_the_users_is_imported_from_the_import_folder(tmp_path: Path) -> None:
    (tmp_path / "my_environment_module.py").write_text(
        "from actors.environment import Step\n"
        "class Echo:\n"
        "    def start(self, prompt, seed):\n        return Talk(seed)\n"
        "class Talk:\n"
        "    def __init__(self, seed):\n        self.seed = seed\n"
        "    def step(self, response):\n        return Step(done=True, reward=self.seed)\n"
        "class Wrong:\n    pass\n"
    )
    config = EnvironmentConfig(name="my_environment_module:Echo", max_turns=3)
    assert make_environment(config, str(tmp_path)).start(make_prompt(), 5).step("x").reward == 5
    with pytest.raises(ConfigError, match="no method start"):
        make_environment(EnvironmentConfig(name="my_environment_module:Wrong"), str(tmp_path))


def test_mistakes_of_an_import_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("x = 1\n\nraise ValueError('too early')\n")
    (tmp_path / "unfinished_module.py").write_text("def f(:\n")
    (tmp_path / "needy_module.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "fine_module.py").write_text("")
    folder = str(tmp_path)
    for path, message in (
        ("broken_module:f", r"a\.b = 'broken_module:f': .*ValueError: too early \(.*broken_module\.py, line 3\)"),
        ("unfinished_module:f", r"SyntaxError: .*unfinished_module\.py, line 1"),
        ("needy_module:f", r"ModuleNotFoundError: .*there_is_no_such_module.*needy_module\.py, line 1"),
        ("absent_module:f", r"no module 'absent_module' in .*import_dir"),
        ("fine_module:f", r"fine_module\.py has no 'f'"),
        ("no_colon", "not of the form MODULE:NAME"),
        ("fine_module:", "not of the form MODULE:NAME"),
        ("../x:f", "not of the form MODULE:NAME"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_object(path, folder, setting="a.b")


def test_a_users_file_cannot_take_the_place_of_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "wave.py").write_text("open = 'mine'\n")
    assert load_object("wave:open", str(tmp_path)) != "mine"


def test_an_error_is_described_with_its_place() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError) as raised:
        fail()
    assert describe(raised.value).startswith("KeyError: 'gone' (")
    assert describe(ValueError()) == "ValueError"


def test_a_call_returns_or_raises_what_the_environment_does() -> None:
    def fail(kind: type[BaseException]) -> None:
        raise kind("from inside")

    async def scenario() -> None:
        caller = EnvironmentCaller(30)
        assert await caller.call(lambda a, b: a + b, 2, 3) == 5
        for kind in (ValueError, TimeoutError):
            with pytest.raises(kind, match="from inside"):
                await caller.call(fail, kind)
        for kind in (SystemExit, StopIteration, KeyboardInterrupt):  # must not end the actor, nor hang it
            with pytest.raises(RuntimeError, match="from inside"):
                await caller.call(fail, kind)

    asyncio.run(scenario())


def test_calls_that_follow_each_other_share_a_thread_and_simultaneous_ones_do_not() -> None:
    together = threading.Barrier(2)

    def meet() -> int:
        together.wait(30)  # for a call in another thread
        return threading.get_ident()

    async def scenario() -> None:
        caller = EnvironmentCaller(30)
        first = await caller.call(threading.get_ident)
        assert await caller.call(threading.get_ident) == first != threading.get_ident()
        assert first in await asyncio.gather(caller.call(meet), caller.call(meet))

    asyncio.run(scenario())


def test_a_thread_whose_call_came_back_late_is_used_again_and_its_late_answer_is_nobodys() -> None:
    release, idents = threading.Event(), []

    def late() -> str:
        idents.append(threading.get_ident())
        release.wait()
        return "late"

    async def scenario() -> None:
        caller = EnvironmentCaller(0.02)
        with pytest.raises(StepTimeoutError):
            await caller.call(late)
        other = await caller.call(threading.get_ident)
        assert other not in idents
        release.set()
        while await caller.call(threading.get_ident) == other:  # until the late one is idle: the last to be is taken
            await asyncio.sleep(0.01)
        assert await caller.call(str, "own") == "own"

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        release.set()


@pytest.mark.parametrize("name", ["single-turn", "second-try"])
def test_environments_of_ours_are_called_in_the_event_loop(name: str) -> None:
    environment = make_environment(EnvironmentConfig(name=name, max_turns=2))
    assert asyncio.run(make_caller(environment, 30).call(threading.get_ident)) == threading.get_ident()


def test_an_environment_that_says_nothing_is_called_in_a_thread() -> None:
    class Theirs:
        def start(self, prompt: Prompt, seed: int) -> Episode:
            raise NotImplementedError

    assert asyncio.run(make_caller(Theirs(), 30).call(threading.get_ident)) != threading.get_ident()


def test_a_call_that_hangs_is_left_behind_and_too_many_of_them_are_an_error() -> None:
    release = threading.Event()

    async def scenario() -> None:
        caller = EnvironmentCaller(0.02, max_stuck=2)
        for _ in range(3):
            with pytest.raises(StepTimeoutError, match=r"longer than 0\.02 s"):
                await caller.call(release.wait)
        with pytest.raises(StuckEnvironmentError, match=r"3 calls .* environment\.step_time_limit_s"):
            await caller.call(int)
        release.set()
        while True:  # those that have come back are forgotten
            try:
                assert await caller.call(int) == 0
                return
            except StuckEnvironmentError:
                await asyncio.sleep(0.01)

    try:
        asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        release.set()


def test_a_call_whose_caller_is_cancelled_counts_as_stuck_while_it_runs() -> None:
    release = threading.Event()

    async def scenario() -> None:
        caller = EnvironmentCaller(30, max_stuck=0)
        task = asyncio.ensure_future(caller.call(release.wait))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(StuckEnvironmentError):
            await caller.call(int)

    try:
        asyncio.run(scenario())
    finally:
        release.set()
