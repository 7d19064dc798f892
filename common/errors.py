"""The errors a user can meet. Each message names the thing, the value and the remedy.

The command line prints a `SlipstreamError` as one line and exits with its `exit_status`; any other exception is a
defect of ours and keeps its traceback.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Something the user can act on."""

    exit_status = 1


class ConfigError(SlipstreamError):
    """A setting is unknown, malformed, or cannot work together with another."""

    exit_status = 2


class DataError(SlipstreamError):
    """A data set is missing, empty or malformed."""

    exit_status = 2


class ModelError(SlipstreamError):
    """A model folder is missing or cannot be used as it is."""

    exit_status = 2


class ResourceError(SlipstreamError):
    """Disk, shared memory, a port or a device is missing or full."""


class WireError(SlipstreamError):
    """A message is malformed: wrong magic, schema, checksum, field or shape."""


class WeightUpdateError(SlipstreamError):
    """A publication was refused before anything was loaded; the engine still serves its old version."""


class PublicationGoneError(WeightUpdateError):
    """The publication's file is not there any more: newer ones are out, or the learner is being replaced."""


class CanaryError(SlipstreamError):
    """After a load the engine's log-probs are not the learner's; the engine must be replaced."""


class EngineDeadError(SlipstreamError):
    """The engine cannot serve any more; the actor that owns it must exit."""


class RunFailedError(SlipstreamError):
    """The run cannot make progress; the message says which service, and why."""
