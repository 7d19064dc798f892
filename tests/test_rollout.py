"""From a lease to a delivery: tokens and masks, turns, rewards, failures, the link to the buffer."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from actors.engine import GenerationRequest
from actors.environment import Episode, Step, StuckEnvironmentError
from actors.reward import RewardPool, Score
from common.errors import ConfigError, EngineDeadError
from common.types import DropReason, FinishReason, LeaseId, Prompt, Trajectory
from tests.actor_kit import TOKENIZER, A, B, InstantRewards, make_worker, run, running, until
from tests.fakes import EOS, Scripted, ScriptedEngine, ScriptedLink, TinyTokenizer, make_lease, make_prompt

HE, LLO = TOKENIZER.encode("he")[0], TOKENIZER.encode("llo")[0]


def roll_out(prompt: Prompt, scripted: Any, **worker: Any) -> tuple[Trajectory, ScriptedEngine]:
    """The trajectory of one lease."""

    async def scenario() -> tuple[Trajectory, ScriptedEngine]:
        engine, link = ScriptedEngine(scripted), ScriptedLink([make_lease(0, prompt)])
        await make_worker(engine, link, **worker).run()
        assert link.failures == {}
        (trajectory,) = link.delivered
        return trajectory, engine

    return run(scenario())


class FunctionEnvironment:
    """Calls a function with (turn number from 0, response) for each step."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def start(self, prompt: Prompt, seed: int) -> Episode:
        outer = self

        class Talk:
            turn = -1

            def step(self, response: str) -> Step:
                self.turn += 1
                return outer.step(self.turn, response)  # type: ignore[no-any-return]

        return Talk()


def test_a_lease_becomes_a_delivered_trajectory() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(Scripted(token_ids=(A, EOS), logprob=-0.25))
        link = ScriptedLink([make_lease(3)])
        pool = RewardPool("exact-match", "", processes=1, time_limit_s=10)
        worker = make_worker(engine, link, rewards=pool, temperature=0.7)
        await worker.start()
        try:
            await worker.run()
        finally:
            await worker.close()
        (trajectory,) = link.delivered
        assert trajectory.token_ids.tolist() == [*TOKENIZER.encode("say a"), A, EOS]
        assert trajectory.loss_mask.tolist() == [False] * 5 + [True, True]
        assert trajectory.rollout_logprobs.tolist() == [0.0] * 5 + [-0.25, -0.25]
        assert trajectory.weight_versions.tolist() == [-1] * 5 + [0, 0]
        assert (trajectory.reward, trajectory.finish_reason, trajectory.temperature) == (1.0, FinishReason.STOP, 0.7)
        assert (trajectory.sample_id, trajectory.lease_id, trajectory.group_id) == (3, 1003, 3)
        assert trajectory.timings.score_s > 0
        assert engine.started
        assert engine.closed
        assert pool.pids == []

    run(scenario())


def test_an_unscorable_sample_is_delivered_as_such_and_named() -> None:
    """F-21, F-22: not a reward of 0, and not a failed attempt."""
    trajectory, _ = roll_out(make_prompt(), None, rewards=InstantRewards(lambda prompt, response: None))
    assert trajectory.reward is None
    assert trajectory.error == "sample 0: no reward"
    assert trajectory.num_sampled == 2


# Masks (F-28)


@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize(
    ("sampled", "budget", "finish"),
    [
        ((5, 6, EOS), 8, FinishReason.STOP),
        ((7, EOS), 8, FinishReason.STOP),
        ((EOS,), 8, FinishReason.STOP),
        ((5, 6, 7, 8), 3, FinishReason.LENGTH),
        ((5, EOS, 6), 8, FinishReason.LENGTH),  # the engine's reason decides, whatever the ids look like
    ],
)
def test_masks_come_from_lengths_never_from_ids(
    pad_is_eos: bool, sampled: tuple[int, ...], budget: int, finish: FinishReason
) -> None:
    """F-28: the sampled EOS is trained, also where a pad token has its id."""
    tokenizer = TinyTokenizer(pad_is_eos=pad_is_eos)
    scripted = Scripted(token_ids=sampled, finish_reason=finish)
    trajectory, _ = roll_out(make_prompt("</s>a</s>"), scripted, tokenizer=tokenizer, max_new_tokens=budget)
    kept = sampled[:budget]
    assert trajectory.token_ids.tolist() == [EOS, A, EOS, *kept]
    assert trajectory.loss_mask.tolist() == [False] * 3 + [True] * len(kept)
    assert trajectory.finish_reason is finish


def test_a_response_without_tokens_is_delivered_without_tokens() -> None:
    """F-10: the buffer drops and counts it."""
    trajectory, engine = roll_out(make_prompt(), Scripted(token_ids=()), max_turns=3, environment_name="second-try")
    assert trajectory.num_sampled == 0
    assert trajectory.token_ids.tolist() == TOKENIZER.encode("say a")
    assert len(engine.requests) == 1


# Turns (F-27)


def test_two_turns_are_one_stream_of_the_very_ids_that_were_sampled() -> None:
    """F-27: "he" + "llo" is not turned into the one id "hello"."""
    environment = FunctionEnvironment(
        lambda turn, response: Step(done=turn == 1, observation="no", reward=(0.25, 0.5)[turn], metrics={"turn": turn})
    )

    def script(request: GenerationRequest) -> Scripted:
        first = len(request.prompt_ids) == 1
        return Scripted(token_ids=(HE, LLO, EOS) if first else (B, EOS), logprob=-0.5 if first else -0.25)

    trajectory, engine = roll_out(make_prompt("a"), script, environment=environment, max_turns=5)
    observation = TOKENIZER.encode("no")
    assert trajectory.token_ids.tolist() == [A, HE, LLO, EOS, *observation, B, EOS]
    assert trajectory.loss_mask.tolist() == [False, True, True, True, False, False, True, True]
    assert trajectory.rollout_logprobs.tolist() == [0, -0.5, -0.5, -0.5, 0, 0, -0.25, -0.25]
    assert [list(request.prompt_ids) for request in engine.requests] == [[A], [A, HE, LLO, EOS, *observation]]
    assert [(turn.start, turn.stop, turn.reward) for turn in trajectory.turns] == [(1, 4, 0.25), (6, 8, 0.5)]
    assert trajectory.reward == 0.75
    assert trajectory.metrics == {"turn": 1.0}
    assert trajectory.finish_reason is FinishReason.STOP


def test_the_score_of_the_last_turn_is_added_to_the_environments_rewards() -> None:
    environment = FunctionEnvironment(lambda turn, response: Step(done=turn == 1, observation="b", reward=0.125))
    seen = []

    def score(prompt: Prompt, response: str) -> float:
        seen.append(response)
        return 1.0

    def script(request: GenerationRequest) -> Scripted:
        return Scripted(token_ids=(A, EOS) if len(request.prompt_ids) == 1 else (HE, LLO, EOS))

    trajectory, _ = roll_out(
        make_prompt("a"), script, environment=environment, max_turns=2, rewards=InstantRewards(score)
    )
    assert trajectory.reward == 1.25
    assert seen == ["hello"]


def test_second_try_end_to_end() -> None:
    def script(request: GenerationRequest) -> Scripted:
        return Scripted(token_ids=(B if request.request_id == "0.0" else A, EOS))

    trajectory, _ = roll_out(make_prompt("say a", "a"), script, environment_name="second-try", max_turns=2)
    assert trajectory.reward == 0.5
    assert trajectory.metrics == {"tries": 2.0, "solved": 1.0}
    prompt = TOKENIZER.encode("say a")
    assert trajectory.token_ids.tolist() == [*prompt, B, EOS, *prompt, A, EOS]


def test_an_episode_that_is_not_done_after_its_turns_is_truncated() -> None:
    environment = FunctionEnvironment(lambda turn, response: Step(done=False, observation="b"))
    trajectory, engine = roll_out(make_prompt("a"), None, environment=environment, max_turns=3)
    assert len(engine.requests) == 3
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.loss_mask.tolist()[-1]  # no observation after the last turn


def test_a_turn_that_is_cut_off_ends_the_episode_as_truncated() -> None:
    environment = FunctionEnvironment(lambda turn, response: Step(done=False, observation="b", reward=0.5))
    trajectory, engine = roll_out(
        make_prompt("a"), Scripted(token_ids=(A,) * 9), environment=environment, max_turns=3, max_new_tokens=2
    )
    assert len(engine.requests) == 1
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert trajectory.reward == 0.5


# Lengths (F-29)


def test_over_long_prompts_are_given_back_before_the_engine_sees_them() -> None:
    """F-29: limit 32."""

    async def scenario() -> None:
        lengths = [10, 31, 32, 33, 500]
        engine = ScriptedEngine()
        link = ScriptedLink([make_lease(n, make_prompt("a" * n, number=n)) for n in lengths])
        worker = make_worker(engine, link, max_prompt_tokens=32, max_tokens=40)
        await worker.run()
        assert sorted(trajectory.sample_id for trajectory in link.delivered) == [10, 31, 32]
        assert {lease_id: failure.reason for lease_id, failure in link.failures.items()} == {
            1033: DropReason.OVER_LONG,
            1500: DropReason.OVER_LONG,
        }
        assert "test/33 has 33 tokens, more than rollout.max_prompt_tokens = 32" in link.failures[LeaseId(1033)].message
        assert worker.status().over_long == 2
        assert max(len(request.prompt_ids) for request in engine.requests) == 32

    run(scenario())


@pytest.mark.parametrize("observed", [1, 3, 9, 18, 19, 40])
def test_an_episode_that_runs_out_of_tokens_is_truncated_and_trained_up_to_the_cut(observed: int) -> None:
    """F-29: the budget of a turn is never below 1."""
    environment = FunctionEnvironment(lambda turn, response: Step(done=False, observation="b" * observed))
    trajectory, engine = roll_out(
        make_prompt("a" * 10),
        Scripted(token_ids=(A, A, EOS)),
        environment=environment,
        max_turns=50,
        max_prompt_tokens=16,
        max_tokens=32,
        max_new_tokens=4,
    )
    budgets = [request.max_new_tokens for request in engine.requests]
    assert all(1 <= budget <= 4 for budget in budgets)
    assert all(len(r.prompt_ids) + r.max_new_tokens <= 32 for r in engine.requests)
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(trajectory.token_ids) <= 32
    assert trajectory.loss_mask.tolist()[-1]
    assert len(trajectory.turns) == len(budgets) == {1: 6, 3: 4, 9: 2, 18: 2, 19: 1, 40: 1}[observed]


# Seeds (F-31)


def test_seeds_differ_between_leases_and_turns_and_not_between_actors() -> None:
    """F-31."""
    environment = FunctionEnvironment(lambda turn, response: Step(done=turn == 1, observation="b"))

    def seeds(actor_id: str) -> dict[str, int]:
        async def scenario() -> dict[str, int]:
            engine = ScriptedEngine()
            link = ScriptedLink([make_lease(n, make_prompt("a")) for n in range(4)])
            await make_worker(engine, link, actor_id=actor_id, environment=environment, max_turns=2).run()
            return {request.request_id: request.seed for request in engine.requests}

        return run(scenario())

    one, two = seeds("actor-0"), seeds("actor-1")
    assert one == two
    assert len(set(one.values())) == 8
    assert all(0 <= seed < 2**63 for seed in one.values())


# Environments that misbehave


def test_a_step_that_takes_too_long_makes_the_trajectory_unscorable() -> None:
    release = threading.Event()

    def step(turn: int, response: str) -> Step:
        if turn == 1:
            release.wait()
        return Step(done=False, observation="b", reward=0.5)

    try:
        trajectory, _ = roll_out(
            make_prompt("a"), None, environment=FunctionEnvironment(step), max_turns=3, step_time_limit_s=0.1
        )
    finally:
        release.set()
    assert trajectory.reward is None
    assert trajectory.error == "sample 0: the environment took longer than 0.1 s"
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0]


def test_a_reward_of_the_environment_that_is_not_finite_makes_the_trajectory_unscorable() -> None:
    environment = FunctionEnvironment(lambda turn, response: Step(done=True, reward=math.nan))
    trajectory, _ = roll_out(make_prompt("a"), None, environment=environment, rewards=InstantRewards(lambda p, r: 1.0))
    assert trajectory.reward is None
    assert trajectory.error == "sample 0: the environment's reward is nan"


def raise_in_step(turn: int, response: str) -> Step:
    raise KeyError("lost my state")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (FunctionEnvironment(raise_in_step), "KeyError: 'lost my state'"),
        (FunctionEnvironment(lambda turn, response: None), "step returned NoneType, not actors.environment.Step"),
        (
            FunctionEnvironment(lambda turn, response: Step(done=False, observation=({"role": "x", "content": "y"},))),
            "must be a text",
        ),
    ],
)
def test_an_environment_that_raises_fails_the_attempt_and_names_sample_and_prompt(
    environment: FunctionEnvironment, message: str
) -> None:
    async def scenario() -> None:
        link = ScriptedLink([make_lease(5, make_prompt("a", number=5)), make_lease(6, make_prompt("a", number=6))])
        worker = make_worker(ScriptedEngine(), link, environment=environment, max_turns=2)
        await worker.run()
        assert link.delivered == []
        failure = link.failures[LeaseId(1005)]
        assert (failure.reason, failure.uses_attempt) == (DropReason.FAILED, True)
        assert failure.message.startswith("sample 5 (prompt test/5): ")
        assert message in failure.message
        assert worker.status().failed == 2

    run(scenario())


def test_too_many_stuck_environments_end_the_actor() -> None:
    release = threading.Event()

    async def scenario() -> None:
        environment = FunctionEnvironment(lambda turn, response: release.wait())
        link = ScriptedLink([make_lease(n, make_prompt("a")) for n in range(40)])
        worker = make_worker(ScriptedEngine(), link, environment=environment, step_time_limit_s=0.01)
        with pytest.raises(StuckEnvironmentError):
            await worker.run()

    try:
        run(scenario())
    finally:
        release.set()


# Failures of the engine


def test_an_error_of_the_engine_about_one_request_fails_that_attempt_alone() -> None:
    async def scenario() -> None:
        def script(request: GenerationRequest) -> Scripted:
            return Scripted(error=ValueError("does not fit") if request.request_id == "1.0" else None)

        link = ScriptedLink([make_lease(n) for n in range(3)])
        await make_worker(ScriptedEngine(script), link).run()
        assert [trajectory.sample_id for trajectory in link.delivered] == [0, 2]
        assert "does not fit" in link.failures[LeaseId(1001)].message

    run(scenario())


def test_the_death_of_the_engine_ends_the_actor_and_hands_every_lease_back_unharmed() -> None:
    """F-05."""

    async def scenario() -> None:
        engine = ScriptedEngine(Scripted(hangs=True))
        link = ScriptedLink([make_lease(n) for n in range(3)])
        worker = make_worker(engine, link)
        async with running(worker) as task:
            await until(lambda: len(engine.requests) == 3)
            engine.die("killed from outside")
            with pytest.raises(EngineDeadError, match="killed from outside"):
                await task
        assert set(link.failures) == {1000, 1001, 1002}
        assert {(f.reason, f.uses_attempt) for f in link.failures.values()} == {(DropReason.FAILED, False)}
        assert link.delivered == []

    run(scenario())


def test_an_actor_whose_engine_is_dead_ends_even_if_the_buffer_is_gone_too() -> None:
    async def scenario() -> None:
        engine, link = ScriptedEngine(), ScriptedLink([make_lease(0)])
        engine.die()
        link.errors["fail"] = [ConnectionError("gone")] * 1000
        with pytest.raises(EngineDeadError):
            await make_worker(engine, link, link_patience_s=0.2).run()

    run(scenario())


def test_a_setting_that_no_sample_can_live_with_ends_the_actor() -> None:
    async def scenario() -> None:
        prompt = make_prompt("", messages=({"role": "user", "content": "a"},))
        with pytest.raises(ConfigError, match="no chat template"):
            await make_worker(ScriptedEngine(), ScriptedLink([make_lease(0, prompt)])).run()

    run(scenario())


# The link


def test_a_void_lease_is_given_up_and_its_slot_is_used_again() -> None:
    """F-18, the actor's part."""

    async def scenario() -> None:
        def script(request: GenerationRequest) -> Scripted:
            return Scripted(hangs=request.request_id == "0.0")

        engine = ScriptedEngine(script)
        link = ScriptedLink([make_lease(0), make_lease(1)])
        worker = make_worker(engine, link, slots=1, heartbeat_s=0.05)
        async with running(worker) as task:
            await until(lambda: len(engine.requests) == 1)
            link.void.add(LeaseId(1000))
            await task
        assert [trajectory.sample_id for trajectory in link.delivered] == [1]
        assert engine.aborted == 1
        assert link.failures == {}
        assert worker.status().void == 1

    run(scenario())


def test_a_delivery_whose_answer_was_lost_is_made_again_and_counts_once() -> None:
    """F-18."""

    async def scenario() -> None:
        link = ScriptedLink([make_lease(0), make_lease(1)], lost_answers=1, close_when_done=False)
        worker = make_worker(ScriptedEngine(), link)
        async with running(worker) as task:
            await until(lambda: worker.status().delivered + worker.status().refused == 2)
            link.close()
            await task
        assert sorted(trajectory.sample_id for trajectory in link.delivered) == [0, 1]
        assert sum(name == "complete" for name, _ in link.calls) == 3
        status = worker.status()
        assert (status.delivered, status.refused, status.link_repeats) == (1, 1, 1)

    run(scenario())


@pytest.mark.parametrize("method", ["poll", "heartbeat", "complete"])
@pytest.mark.parametrize("error", [ConnectionError, ConnectionResetError, TimeoutError])
def test_a_buffer_that_is_away_for_a_while_is_waited_for(method: str, error: type[Exception]) -> None:
    async def scenario() -> None:
        errors = {method: [error("away"), error("away")]}
        link = ScriptedLink([make_lease(0), make_lease(1)], errors=errors, close_when_done=False)
        async with running(make_worker(ScriptedEngine(), link, heartbeat_s=0.05)) as task:
            await until(lambda: len(link.delivered) == 2 and not errors[method])
            link.close()
            await task

    run(scenario())


def test_a_buffer_that_stays_away_ends_the_actor() -> None:
    async def scenario() -> None:
        link = ScriptedLink([make_lease(0)], errors={"complete": [ConnectionError("away")] * 1000})
        with pytest.raises(ConnectionError, match=r"has not answered a delivery for 0\.3 s: away"):
            await make_worker(ScriptedEngine(), link, link_patience_s=0.3).run()

    run(scenario())


def test_any_other_error_of_the_link_is_raised_at_once() -> None:
    async def scenario() -> None:
        link = ScriptedLink([make_lease(0)], errors={"complete": [ValueError("a defect")]})
        with pytest.raises(ValueError, match="a defect"):
            await make_worker(ScriptedEngine(), link).run()

    run(scenario())


def test_heartbeats_name_the_leases_that_are_held() -> None:
    async def scenario() -> None:
        link = ScriptedLink([make_lease(n) for n in range(2)])
        worker = make_worker(ScriptedEngine(Scripted(hangs=True)), link, heartbeat_s=0.05)
        async with running(worker):
            await until(lambda: ("heartbeat", (1000, 1001)) in link.calls)

    run(scenario())


def test_no_more_leases_are_asked_for_than_there_are_free_slots() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(Scripted(delay_s=0.01))
        link = ScriptedLink([make_lease(n) for n in range(10)])
        worker = make_worker(engine, link, slots=3)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, worker.status().in_flight)
                await asyncio.sleep(0.001)

        watcher = asyncio.ensure_future(watch())
        await worker.run()
        watcher.cancel()
        assert most == 3
        assert len(link.delivered) == 10

    run(scenario())


def test_trajectories_that_wait_for_scores_keep_no_slot_until_there_are_as_many_as_slots() -> None:
    class HeldRewards(InstantRewards):
        def __init__(self) -> None:
            super().__init__(lambda prompt, response: 1.0)
            self.go_on = asyncio.Event()

        async def score(self, prompt: Prompt, response: str, sample_id: int | str) -> Score:
            await self.go_on.wait()
            return await super().score(prompt, response, sample_id)

    async def scenario() -> None:
        engine, rewards = ScriptedEngine(), HeldRewards()
        link = ScriptedLink([make_lease(n) for n in range(10)])
        worker = make_worker(engine, link, rewards=rewards, slots=2)
        async with running(worker) as task:
            await until(lambda: len(engine.requests) == 4)
            await asyncio.sleep(0.05)
            assert worker.status().in_flight == len(engine.requests) == 4
            rewards.go_on.set()
            await task
        assert len(link.delivered) == 10

    run(scenario())


def test_the_end_of_the_run_ends_the_actor_at_once_and_delivers_nothing_more() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(Scripted(hangs=True))
        link = ScriptedLink([make_lease(0)])
        worker = make_worker(engine, link)
        async with running(worker) as task:
            await until(lambda: len(engine.requests) == 1)
            link.close()
            await task
        assert link.delivered == []
        assert link.failures == {}
        assert engine.aborted == 1
        assert worker.status().in_flight == 0

    run(scenario())


def test_the_status_counts_what_happened() -> None:
    async def scenario() -> None:
        def script(request: GenerationRequest) -> Scripted:
            return Scripted(token_ids=(A,) * 20 if request.request_id == "1.0" else (A, B, EOS))

        link = ScriptedLink([make_lease(n) for n in range(3)])
        rewards = InstantRewards(lambda prompt, response: None if prompt.prompt_id == "test/2" else 0.5)
        worker = make_worker(ScriptedEngine(script), link, rewards=rewards, max_new_tokens=8)
        await worker.run()
        status = worker.status()
        assert (status.delivered, status.unscorable, status.truncated) == (3, 1, 1)
        assert (status.tokens_sampled, status.reward_sum) == (3 + 8 + 3, 1.0)
        assert (status.failed, status.over_long, status.void, status.refused, status.in_flight) == (0, 0, 0, 0, 0)
        assert status.weight_version == 0

    run(scenario())
