"""Rules of flow control as pure functions: who may be admitted, what may be trained, what waits.

B is the batch size in samples, η the staleness bound, c the learner's version. A group always counts its full size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from buffer.settings import OnExceeded


def admissible(live: int, *, bound: int, batch_size: int, unit_size: int) -> int:
    """Units that may still be admitted: live + n · unit_size ≤ (η + 1) · B.

    Args:
        live: samples of all units that were neither trained nor dropped, whatever became of their members.
    """
    return max(0, ((bound + 1) * batch_size - live) // unit_size)


def fitting(
    live: int, reserved_bytes: int, *, unit_size: int, batch_size: int, max_bytes: int, longest_bytes: int
) -> int:
    """Units that may still be admitted under the byte limit.

    Every sample still to be delivered counts at the greatest length, so the limit holds whatever arrives. The gate is
    never shut while the live units do not make up one batch; that one batch fits is checked at start.

    Args:
        reserved_bytes: of delivered trajectories of live units, and of their samples to come at the greatest length.
    """
    by_bytes = max(0, max_bytes - reserved_bytes) // (unit_size * longest_bytes)
    return max(by_bytes, (batch_size - live) // unit_size)


def effective_mode(on_exceeded: OnExceeded, bound: int) -> OnExceeded:
    """At η = 0 every token of a batch comes from one version, so `mask` acts as `drop`."""
    return "drop" if on_exceeded == "mask" and bound == 0 else on_exceeded


def last_version(spans: Iterable[tuple[int, int]], *, bound: int, mode: OnExceeded) -> int | None:
    """The learner's last version at which a unit may be trained; None: its tokens set no limit.

    drop: no token of any member may be staler than η. mask: some token of some member must not be. wait: the version at
    issue decides, see `may_form`.

    Args:
        spans: (oldest, newest) weight version of the sampled tokens of each member.
    """
    if mode == "wait":
        return None
    if mode == "drop":
        return min(oldest for oldest, _ in spans) + bound
    return max(newest for _, newest in spans) + bound


def may_form(outside: Mapping[int, int], *, version: int, bound: int, batch_size: int) -> bool:
    """`wait`: whether a batch may be formed now, so that no sample outside it ever has to be trained too stale.

    For every k = 0..η, the samples outside whose version at issue + η ≤ c + k number at most k · B: they all have to go
    into the k batches at c + 1 .. c + k.

    Args:
        outside: version at issue -> untrained samples left outside that have a lease; others have time.
    """
    return all(_due(outside, version + k, bound) <= k * batch_size for k in range(bound + 1))


def excess(live: Mapping[int, int], *, version: int, bound: int, batch_size: int) -> int:
    """`wait`: samples too many for any batch to satisfy `may_form`, even with every lease delivered. 0: none.

    As `may_form` with the batch at c counted in: at most (k + 1) · B for k = 0..η, and none at all that is already
    beyond the bound (k = -1).

    Args:
        live: version at issue -> untrained samples that have a lease.
    """
    return max(_due(live, version + k, bound) - (k + 1) * batch_size for k in range(-1, bound + 1))


def _due(samples: Mapping[int, int], deadline: int, bound: int) -> int:
    """Samples that must be trained at version `deadline` or before."""
    return sum(count for issued_at, count in samples.items() if issued_at + bound <= deadline)
