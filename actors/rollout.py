"""`RolloutWorker`: leases in, trajectories out, weights as they come, evaluations beside it. Plain asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.engine import Engine
from actors.environment import Environment
from actors.episode import EpisodePlayer, OverLongPromptError, Rollout, derive_seed
from actors.evaluation import EvaluationResult, summarise
from actors.formatting import PromptFormatter
from actors.patient_link import PatientLink
from actors.reward import RewardPool
from actors.weight_loader import WeightLoader
from buffer.links import ActorLink, Poll
from common.config import EnvironmentConfig, RolloutConfig
from common.errors import CanaryError, ConfigError, EngineDeadError, ResourceError, RunFailedError
from common.imports import describe
from common.types import DropReason, Failure, Lease, LeaseId, Prompt, Trajectory

__all__ = ["ActorStatus", "EvaluationResult", "RolloutWorker"]

log = logging.getLogger(__name__)

POLL_WAIT_S = 10.0  # a long poll returns after this at the latest
GIVE_BACK_LIMIT_S = 5.0  # for handing leases back when the actor fails
BEATS_PER_LIMIT = 5  # heartbeats within the time that makes an actor silent
WEIGHT_PAUSE_S = 0.2  # before a refused publication is tried again; doubles

# Not the sample's doing: the actor cannot go on, or nothing would be better with another sample.
FATAL = (EngineDeadError, CanaryError, ConfigError, ResourceError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStatus:
    """Counts since the start of the actor, and its present state."""

    actor_id: str
    weight_version: int
    in_flight: int  # leases held
    evaluating: bool
    tokens_sampled: int  # of finished trajectories and evaluations
    delivered: int  # trajectories the buffer took
    refused: int  # trajectories it did not take: late, or delivered before
    unscorable: int  # trajectories without a reward, delivered as such
    truncated: int
    failed: int  # attempts that raised
    over_long: int  # prompts
    void: int  # leases given up because the buffer said so
    reward_sum: float  # of the delivered trajectories with a reward
    weight_loads: int
    weight_refusals: int
    stall_s: float  # the engine generated nothing because of weight loads
    link_repeats: int  # calls to the buffer that had to be made again
    scorers_replaced: int


class RolloutWorker:
    """One rollout actor. All its calls belong to one event loop.

    `start` → `run` until the buffer closes or something fails → `close`. `evaluate` at any time in between.

    Args:
        rewards: scoring processes, not started yet; none: the reward is the sum of the environment's.
        heartbeat_s: silence after which the buffer takes the actor for dead.
        max_delay_s: longest time that an evaluation puts off a weight load.
        link_patience_s: how long the buffer may be out of reach.
    """

    def __init__(
        self,
        *,
        actor_id: str,
        engine: Engine,
        environment: Environment,
        rewards: RewardPool | None,
        formatter: PromptFormatter,
        link: ActorLink,
        rollout: RolloutConfig,
        environment_config: EnvironmentConfig,
        heartbeat_s: float,
        max_delay_s: float,
        link_patience_s: float = 300.0,
    ) -> None:
        self._actor_id = actor_id
        self._engine = engine
        self._rewards = rewards
        self._link = PatientLink(link, patience_s=link_patience_s)
        self._rollout = rollout
        self._beat_s = heartbeat_s / BEATS_PER_LIMIT
        self._loader = WeightLoader(engine, max_delay_s=max_delay_s, first_pause_s=WEIGHT_PAUSE_S)
        self._player = EpisodePlayer(
            engine=engine,
            environment=environment,
            rewards=rewards,
            formatter=formatter,
            rollout=rollout,
            environment_config=environment_config,
        )
        self._leases: dict[LeaseId, asyncio.Task[None]] = {}
        self._generated: set[LeaseId] = set()  # held leases that only wait for score and delivery
        self._freed = asyncio.Event()
        self._broken: list[LeaseId] = []  # ended by an error that ends the actor
        self._failed: asyncio.Future[None] | None = None  # the first such error
        self._evaluating = 0
        self._counts = dict.fromkeys(
            ("tokens_sampled", "delivered", "refused", "unscorable", "truncated", "failed", "over_long", "void"), 0
        )
        self._reward_sum = 0.0

    async def start(self) -> None:
        """Start the engine and the scoring processes.

        Raises:
            ConfigError, ModelError, ResourceError, EngineDeadError: see `Engine.start` and `RewardPool.start`.
        """
        if self._rewards is not None:
            await self._rewards.start()  # first: a function that cannot be imported shows before the engine loads
        await self._engine.start()

    async def run(self) -> None:
        """Until the buffer says that the run is over.

        Raises:
            EngineDeadError, CanaryError: the actor must be replaced. The leases were handed back.
            Exception: the first error, whatever it is.
        """
        self._failed = asyncio.get_running_loop().create_future()
        loops = [self._ask_for_work(), self._ask_for_news(), self._beat(), self._loader.run()]
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        error: BaseException | None = None
        try:
            await asyncio.wait([self._failed, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for ended in filter(asyncio.Future.done, (self._failed, *tasks)):
                ended.result()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._failed.cancel()
            held = dict(self._leases)
            await self._loader.stop(error or RunFailedError(f"{self._actor_id} has left the run"))
            await _cancel([*tasks, *held.values()])
            if isinstance(error, Exception):
                await self._give_back({*held, *self._broken}, error)

    async def evaluate(
        self, prompts: Sequence[Prompt], *, min_version: int, temperature: float, seed: int
    ) -> EvaluationResult:
        """Roll out held-out prompts beside the leases. Nothing of it goes to the buffer.

        Args:
            min_version: weights to wait for. Newer ones are put off until the end, up to `evaluation.max_delay_s`;
                past that the result has a range of versions.
            temperature: 0: greedy.

        Raises:
            EngineDeadError, CanaryError: the engine failed meanwhile.
            Exception: what ended `run` before the weights came.
        """
        await self._loader.at_least(min_version)
        slots = asyncio.Semaphore(self._rollout.slots)

        async def one(index: int, prompt: Prompt) -> Rollout | str:
            async with slots:
                try:
                    return await self._player.play(
                        prompt,
                        name=f"evaluation {prompt.prompt_id}",
                        temperature=temperature,
                        seed=derive_seed(seed, index),
                    )
                except FATAL:
                    raise
                except Exception as error:
                    return f"{prompt.prompt_id}: {describe(error)}"

        self._evaluating += 1
        tasks = []
        try:
            async with self._loader.held():
                tasks = [asyncio.ensure_future(one(index, prompt)) for index, prompt in enumerate(prompts)]
                result = summarise(await asyncio.gather(*tasks))
        finally:
            self._evaluating -= 1
            await _cancel(tasks)
        self._counts["tokens_sampled"] += sum(result.lengths)
        return result

    def status(self) -> ActorStatus:
        return ActorStatus(
            actor_id=self._actor_id,
            weight_version=self._engine.weight_version,
            in_flight=len(self._leases),
            evaluating=self._evaluating > 0,
            **self._counts,
            reward_sum=self._reward_sum,
            weight_loads=self._loader.loads,
            weight_refusals=self._loader.refusals,
            stall_s=self._loader.stall_s,
            link_repeats=self._link.repeats,
            scorers_replaced=self._rewards.replaced if self._rewards is not None else 0,
        )

    async def close(self) -> None:
        """End the engine and the scoring processes."""
        if self._rewards is not None:
            await self._rewards.close()
        await self._engine.close()

    # Loops of `run`

    async def _ask_for_work(self) -> None:
        """One long poll at a time for as many leases as there are free slots; ends when the buffer closes."""
        closing = False
        while not closing:
            self._freed.clear()
            if (free := self._free_slots()) > 0:
                closing = self._take(await self._poll(free))
            else:
                await self._freed.wait()

    def _free_slots(self) -> int:
        """A trajectory that is being scored or delivered takes none, so that the engine does not wait for that.

        Unless as many of those wait as there are slots: then scoring is behind, and more would only grow old there.
        """
        slots, held = self._rollout.slots, len(self._leases)
        return min(slots - (held - len(self._generated)), 2 * slots - held)

    async def _ask_for_news(self) -> None:
        """A long poll of its own, so that weights are heard of while every slot is taken."""
        while not self._take(await self._poll(0)):
            pass

    async def _poll(self, num_slots: int) -> Poll:
        # The version it knows of, not the one that is loaded: else a load under way would be told of again and again.
        return await self._link.poll(self._actor_id, num_slots, self._loader.known_version, POLL_WAIT_S)

    def _take(self, poll: Poll) -> bool:
        """Take over what a poll brought; true when the run is over."""
        if poll.manifest is not None:
            self._loader.tell(poll.manifest)
        for lease in poll.leases:
            task = asyncio.ensure_future(self._serve(lease))
            self._leases[lease.lease_id] = task
            task.add_done_callback(functools.partial(self._release, lease.lease_id))
        return poll.closing

    def _release(self, lease_id: LeaseId, task: asyncio.Task[None]) -> None:
        del self._leases[lease_id]
        self._generated.discard(lease_id)
        self._freed.set()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken.append(lease_id)
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)

    def _vacate(self, lease_id: LeaseId) -> None:
        self._generated.add(lease_id)
        self._freed.set()

    async def _beat(self) -> None:
        while True:
            for lease_id in await self._link.heartbeat(self._actor_id, list(self._leases)):
                task = self._leases.get(lease_id)
                if task is not None:
                    self._counts["void"] += 1
                    task.cancel()
            await asyncio.sleep(self._beat_s)

    # One lease

    async def _serve(self, lease: Lease) -> None:
        """Roll out, and deliver or fail the lease. What the sample has no part in is raised."""
        await self._loader.at_least(lease.min_weight_version)
        try:
            rollout = await self._player.play(
                lease.prompt,
                name=str(lease.sample_id),
                temperature=self._rollout.temperature,
                seed=lease.seed,
                on_generated=functools.partial(self._vacate, lease.lease_id),
            )
            trajectory = self._trajectory(lease, rollout)
        except FATAL:
            raise
        except OverLongPromptError as error:
            self._counts["over_long"] += 1
            await self._link.fail(lease.lease_id, Failure(reason=DropReason.OVER_LONG, message=str(error)))
        except Exception as error:
            self._counts["failed"] += 1
            message = f"sample {lease.sample_id} (prompt {lease.prompt.prompt_id}): {describe(error)}"
            log.warning("attempt %d of %s", lease.attempt, message, exc_info=error)
            await self._link.fail(lease.lease_id, Failure(reason=DropReason.FAILED, message=message))
        else:
            await self._deliver(trajectory)

    async def _deliver(self, trajectory: Trajectory) -> None:
        receipt = await self._link.complete(trajectory)
        self._counts["tokens_sampled"] += trajectory.num_sampled
        self._counts["truncated"] += trajectory.truncated
        self._counts["delivered" if receipt.accepted else "refused"] += 1
        if trajectory.reward is None:
            self._counts["unscorable"] += 1
            log.warning("unscorable: %s", trajectory.error)
        elif receipt.accepted:
            self._reward_sum += trajectory.reward

    def _trajectory(self, lease: Lease, rollout: Rollout) -> Trajectory:
        return Trajectory(
            sample_id=lease.sample_id,
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            prompt_id=lease.prompt.prompt_id,
            epoch=lease.prompt.epoch,
            attempt=lease.attempt,
            token_ids=rollout.token_ids,
            loss_mask=rollout.loss_mask,
            rollout_logprobs=rollout.rollout_logprobs,
            weight_versions=rollout.weight_versions,
            turns=rollout.turns,
            temperature=self._rollout.temperature,
            reward=rollout.reward,
            finish_reason=rollout.finish_reason,
            timings=rollout.timings,
            metrics=rollout.metrics,
            error=rollout.error,
        )

    async def _give_back(self, lease_ids: Iterable[LeaseId], error: Exception) -> None:
        """Hand leases back unharmed, so that others need not wait until this actor is noticed to be silent."""
        failure = Failure(reason=DropReason.FAILED, message=f"{self._actor_id}: {describe(error)}", uses_attempt=False)
        giving = asyncio.gather(*(self._link.fail(lease_id, failure) for lease_id in lease_ids), return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_BACK_LIMIT_S):
                await giving


async def _cancel(tasks: Sequence[asyncio.Future[None]] | Sequence[asyncio.Future[Rollout | str]]) -> None:
    """Cancel and wait for the end; errors of what was cancelled are of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
