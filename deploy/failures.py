"""What a failed Ray call means."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError, RayTaskError

from common.errors import CanaryError, EngineDeadError, RunFailedError, SlipstreamError, WeightUpdateError

ENGINE_DEATHS = (EngineDeadError, CanaryError, WeightUpdateError)  # what an actor raises to be replaced


def died(error: RayError) -> bool:
    """The process that was called is dead, or out of reach. Not: it raised, because another one is."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def replaceable(error: RayError) -> bool:
    """Another rollout actor in its place mends it."""
    return died(error) or isinstance(cause_of(error), ENGINE_DEATHS)


def cause_of(error: RayError) -> BaseException:
    """What a service raised, out of Ray's wrapping."""
    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    return error if cause is None else cause


def named(error: RayError, service: str) -> SlipstreamError:
    """An error of ours as it is; anything else as a failed run that names the service."""
    cause = cause_of(error)
    if isinstance(cause, SlipstreamError):
        return cause
    if isinstance(cause, RayActorError) and not died(error):
        service = "buffer"  # the only one that others call
    return RunFailedError(f"{service} failed: {type(cause).__name__}: {first_line(cause)}")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
