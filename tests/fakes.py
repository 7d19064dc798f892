"""Stand-ins that follow the contracts: an engine with a script, links in this process, small tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine import Generation, GenerationRequest, WeightUpdate
from buffer.links import Poll
from buffer.replay import ReplayBuffer
from common import wire
from common.errors import EngineDeadError
from common.types import (
    Failure,
    FinishReason,
    GroupId,
    Lease,
    LeaseId,
    Prompt,
    Receipt,
    SampleId,
    Trajectory,
    WeightVersion,
)
from common.weights import Canary, WeightManifest

BOS, EOS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """What `ScriptedEngine` does with one request."""

    token_ids: Sequence[int] = (7, EOS)
    logprob: float = -0.5
    delay_s: float = 0.0  # before the first token
    token_delay_s: float = 0.0  # before each further one
    finish_reason: FinishReason | None = None  # None: STOP, or LENGTH if the budget cuts the tokens
    error: Exception | None = None
    hangs: bool = False


Script = Callable[[GenerationRequest], Scripted]


class ScriptedEngine:
    """An `Engine` whose tokens come from a script, each labelled with the version at the moment it is "sampled"."""

    def __init__(self, script: Script | Scripted | None = None, *, load_s: float = 0.0) -> None:
        self._script = script if callable(script) else lambda _: script or Scripted()
        self._load_s = load_s
        self._version = 0
        self._death: EngineDeadError | None = None
        self._died = asyncio.Event()
        self.requests: list[GenerationRequest] = []
        self.versions_at_start: list[int] = []  # one a request
        self.loaded: list[int] = []
        self.load_errors: list[Exception] = []  # raised by the next loads, first one first
        self.aborted = 0
        self.started = False
        self.closed = False

    @property
    def weight_version(self) -> int:
        return self._version

    async def start(self) -> None:
        self.started = True

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        self.versions_at_start.append(self._version)
        scripted = self._script(request)
        if scripted.error is not None:
            raise scripted.error
        try:
            await self._sleep(3600.0 if scripted.hangs else scripted.delay_s)
            versions = []
            for index, _ in enumerate(scripted.token_ids[: request.max_new_tokens]):
                if index and scripted.token_delay_s:
                    await self._sleep(scripted.token_delay_s)
                versions.append(self._version)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        cut = len(scripted.token_ids) > request.max_new_tokens
        return Generation(
            token_ids=np.array(scripted.token_ids[: request.max_new_tokens], np.int32),
            logprobs=np.full(len(versions), scripted.logprob, np.float32),
            weight_versions=np.array(versions, np.int32),
            finish_reason=scripted.finish_reason or (FinishReason.LENGTH if cut else FinishReason.STOP),
        )

    async def load_weights(self, manifest: WeightManifest, payload: Mapping[str, Any] | None = None) -> WeightUpdate:
        if self._death is not None:
            raise self._death
        if self.load_errors:
            raise self.load_errors.pop(0)
        if self._load_s:
            await asyncio.sleep(self._load_s)
        self._version = manifest.version
        self.loaded.append(manifest.version)
        return WeightUpdate(
            version=manifest.version, validate_s=0.0, stall_s=self._load_s, canary_s=0.0, canary_error=0.0
        )

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.full(len(token_ids) - 1, -0.5, np.float32)

    async def connect_transport(self, init_info: Mapping[str, Any]) -> None:
        return None

    async def close(self) -> None:
        self.closed = True
        self.die("the engine was closed")

    def die(self, message: str = "the scripted engine died") -> None:
        """Every pending and later call raises `EngineDeadError`."""
        self._death = EngineDeadError(message)
        self._died.set()

    async def _sleep(self, seconds: float) -> None:
        if seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._died.wait()
        if self._death is not None:
            raise self._death


def make_manifest(version: int) -> WeightManifest:
    """A publication without content."""
    return WeightManifest(
        version=version, path="", size_bytes=0, digest="", tensors=(), canary=Canary(token_ids=(1, 2), logprobs=(-1.0,))
    )


def make_prompt(text: str = "say a", answer: str | None = "a", number: int = 0, **changes: Any) -> Prompt:
    return Prompt(**{"prompt_id": f"test/{number}", "epoch": 0, "text": text, "answer": answer, **changes})


def make_lease(number: int = 0, prompt: Prompt | None = None, min_version: int = 0, **changes: Any) -> Lease:
    fields: dict[str, Any] = {
        "lease_id": LeaseId(1000 + number),
        "sample_id": SampleId(number),
        "attempt": 0,
        "group_id": GroupId(number),
        "group_size": 1,
        "prompt": prompt or make_prompt(number=number),
        "min_weight_version": WeightVersion(min_version),
        "seed": 100 + number,
        "time_left_s": 600.0,
    }
    return Lease(**{**fields, **changes})


@dataclass
class ScriptedLink:
    """An `ActorLink` that hands out given leases and closes once each has come back."""

    leases: list[Lease]
    manifest: WeightManifest | None = None
    void: set[LeaseId] = field(default_factory=set)
    errors: dict[str, list[Exception]] = field(default_factory=dict)  # raised by the next calls of a method
    lost_answers: int = 0  # deliveries that are taken and then answered with a ConnectionError
    close_when_done: bool = True
    delivered: list[Trajectory] = field(default_factory=list)
    failures: dict[LeaseId, Failure] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    closing: bool = False

    def __post_init__(self) -> None:
        self._open = {lease.lease_id for lease in self.leases}
        self._changed = asyncio.Event()

    def announce(self, version: int) -> None:
        self.manifest = make_manifest(version)
        self._notify()

    def close(self) -> None:
        self.closing = True
        self._notify()

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        self._meet("poll", num_slots)
        deadline = time.monotonic() + wait_s
        while True:
            newer = self.manifest if self.manifest and self.manifest.version > loaded_version else None
            leases, self.leases = tuple(self.leases[:num_slots]), self.leases[num_slots:]
            done = self.close_when_done and not self._open
            left = deadline - time.monotonic()
            if leases or newer or done or self.closing or left <= 0:
                return Poll(leases=leases, manifest=newer, closing=done or self.closing)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        self._meet("heartbeat", tuple(lease_ids))
        void = [lease_id for lease_id in lease_ids if lease_id in self.void]
        for lease_id in void:
            self._end(lease_id)
        return void

    async def complete(self, trajectory: Trajectory) -> Receipt:
        self._meet("complete", trajectory.sample_id)
        await asyncio.sleep(0)
        accepted = trajectory.lease_id in self._open
        if accepted:
            self.delivered.append(wire.decode(wire.encode(trajectory)))
            self._end(trajectory.lease_id)
        if self.lost_answers:
            self.lost_answers -= 1
            raise ConnectionError("the answer was lost")
        return Receipt(accepted=accepted, reason="" if accepted else "duplicate")

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        self._meet("fail", lease_id)
        self.failures[lease_id] = failure
        self._end(lease_id)
        return Receipt(accepted=True)

    def _meet(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def _end(self, lease_id: LeaseId) -> None:
        self._open.discard(lease_id)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LocalLink:
    """An `ActorLink` over a `ReplayBuffer` in this process. Trajectories go through the wire format."""

    def __init__(self, buffer: ReplayBuffer, *, tick_s: float = 0.02) -> None:
        self.buffer = buffer
        self.manifest: WeightManifest | None = None
        self.closing = False
        self._tick_s = tick_s

    async def poll(self, actor_id: str, num_slots: int, loaded_version: int, wait_s: float) -> Poll:
        deadline = time.monotonic() + wait_s
        while True:
            newer = self.manifest if self.manifest and self.manifest.version > loaded_version else None
            leases = tuple(self.buffer.lease(actor_id, num_slots)) if num_slots and not self.closing else ()
            if leases or newer or self.closing or time.monotonic() >= deadline:
                return Poll(leases=leases, manifest=newer, closing=self.closing)
            await asyncio.sleep(self._tick_s)

    async def heartbeat(self, actor_id: str, lease_ids: Sequence[LeaseId]) -> list[LeaseId]:
        return self.buffer.heartbeat(actor_id, lease_ids)

    async def complete(self, trajectory: Trajectory) -> Receipt:
        return self.buffer.complete(wire.decode(wire.encode(trajectory)))

    async def fail(self, lease_id: LeaseId, failure: Failure) -> Receipt:
        return self.buffer.fail(lease_id, failure)


class TinyTokenizer:
    """A word-piece tokenizer in the manner of transformers; the longest piece wins.

    Pieces of the default vocabulary split "hello" as one id although "he" + "llo" gives the same text.
    """

    PIECES = ("<pad>", "<s>", "</s>", "he", "llo", "hello", *"abcdefghijklmnopqrstuvwxyz0123456789 .:=?!\n")

    def __init__(
        self,
        *,
        chat_template: str | None = None,
        adds_bos: bool = False,
        extra_special: Sequence[str] = (),
        pad_is_eos: bool = False,
    ) -> None:
        pieces = [*self.PIECES, *extra_special]
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        self._pieces = pieces
        self._specials = ("<pad>", "<s>", "</s>", *extra_special)
        by_length = sorted(pieces, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length)) + "|.", re.DOTALL)
        self._adds_bos = adds_bos
        self.chat_template = chat_template
        self.bos_token_id = BOS
        self.eos_token_id = EOS
        self.pad_token_id = EOS if pad_is_eos else None
        self.all_special_ids = [self._ids[piece] for piece in self._specials]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [self._ids[piece] for piece in self._pattern.findall(text)]
        return [BOS, *ids] if self._adds_bos and add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return "".join(self._pieces[token] for token in token_ids if token not in skipped)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        import jinja2

        assert not tokenize
        assert self.chat_template is not None
        return (
            jinja2.Environment()
            .from_string(self.chat_template)
            .render(messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<s>", eos_token="</s>")
        )


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT_SPECIALS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
