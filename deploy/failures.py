"""What a failed Ray call means."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError, RayTaskError

from common.errors import CanaryError, EngineDeadError, RunFailedError, SlipstreamError

ACTOR_DEATHS = (RayActorError, EngineDeadError, CanaryError)  # those of a rollout actor that a replacement mends


def cause_of(error: RayError) -> BaseException:
    """What a service raised, out of Ray's wrapping."""
    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    return error if cause is None else cause


def named(cause: BaseException, service: str) -> SlipstreamError:
    """An error of ours as it is; anything else as a failed run that names the service."""
    if isinstance(cause, SlipstreamError):
        return cause
    return RunFailedError(f"{service} failed: {type(cause).__name__}: {first_line(cause)}")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
