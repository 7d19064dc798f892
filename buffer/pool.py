"""Live units: how many there are, which are ready, and which come next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping

from buffer import groups, staleness
from buffer.records import Stage, Unit
from buffer.settings import ReplaySettings
from common.types import GroupId


class UnitPool:
    """Units that were admitted and neither trained nor dropped, indexed by age.

    `order` of a unit is kept up to date by calling `reorder` whenever a lease of a member changed. All operations are
    O(log n) or better, but for `oldest_first`.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self._mode = staleness.effective_mode(settings.on_exceeded, settings.staleness_bound)
        self._live: dict[GroupId, Unit] = {}
        self._live_at: Counter[int | None] = Counter()  # samples by version at issue; None: without a lease
        self._ready_at: Counter[int | None] = Counter()  # of these, ready
        self._ready: list[tuple[tuple[int, int], GroupId]] = []  # heap; entries of units dropped since are skipped
        self._num_ready = 0  # units
        self._last_versions: list[tuple[int, GroupId]] = []  # heap; the lowest entry of a unit holds

    @property
    def live_samples(self) -> int:
        """Samples of live units, each unit with its full size."""
        return len(self._live) * self._settings.group_size

    @property
    def num_ready(self) -> int:
        """Units."""
        return self._num_ready

    @property
    def units(self) -> Mapping[GroupId, Unit]:
        return self._live

    def add(self, unit: Unit) -> None:
        """A unit that is live from now on, ready or not."""
        self._live[unit.unit_id] = unit
        unit.order = groups.order(unit)
        self._live_at[_version(unit)] += unit.size
        if unit.stage is Stage.READY:
            self._index_ready(unit)
        else:
            self._index_last_version(unit)

    def reorder(self, unit: Unit) -> None:
        """A lease of a member was issued, delivered or lost."""
        assert unit.stage is Stage.ASSEMBLING
        before = _version(unit)
        unit.order = groups.order(unit)
        _shift(self._live_at, before, -unit.size)
        _shift(self._live_at, _version(unit), unit.size)
        self._index_last_version(unit)

    def make_ready(self, unit: Unit) -> None:
        """A live unit is whole, or its batch is not trained after all."""
        if unit.stage is Stage.ASSEMBLING:
            self.reorder(unit)
        unit.stage = Stage.READY
        self._index_ready(unit)

    def remove(self, unit: Unit) -> None:
        """The unit was trained or dropped."""
        if unit.stage is Stage.READY:
            self._leave_ready(unit)
        unit.stage = Stage.GONE
        del self._live[unit.unit_id]
        _shift(self._live_at, _version(unit), -unit.size)

    def take(self, num_units: int) -> list[Unit]:
        """The oldest ready units, in order; they are in training from now on."""
        taken: list[Unit] = []
        while len(taken) < num_units:
            _, unit_id = heapq.heappop(self._ready)
            unit = self._live.get(unit_id)
            if unit is not None and unit.stage is Stage.READY:
                self._leave_ready(unit)
                unit.stage = Stage.IN_TRAINING
                taken.append(unit)
        return taken

    def ineligible(self, version: int) -> list[Unit]:
        """Units that may not be trained at this version or any later one; the caller removes them."""
        if self._mode == "wait":
            return self._beyond_wait(version)
        doomed: dict[GroupId, Unit] = {}
        while self._last_versions and self._last_versions[0][0] < version:
            _, unit_id = heapq.heappop(self._last_versions)
            unit = self._live.get(unit_id)
            if unit is not None and unit.stage is not Stage.IN_TRAINING:  # one that returns is indexed anew
                doomed[unit_id] = unit
        return list(doomed.values())

    def may_take(self, num_units: int, version: int) -> bool:
        """Whether the rule of `wait` lets the oldest ready units be a batch at this version; true in other modes."""
        if self._mode != "wait":
            return True
        outside = _leased(self._live_at)
        left = num_units * self._settings.group_size
        for issued_at, count in sorted(_leased(self._ready_at).items()):
            taken = min(left, count)
            outside[issued_at] -= taken
            left -= taken
        bound, batch_size = self._settings.staleness_bound, self._settings.batch_size
        return staleness.may_form(outside, version=version, bound=bound, batch_size=batch_size)

    def oldest_first(self) -> list[Unit]:
        """All live units; those without a lease last."""
        return sorted(self._live.values(), key=lambda unit: (unit.order is None, unit.order or (0, 0), unit.unit_id))

    def _beyond_wait(self, version: int) -> list[Unit]:
        """The oldest units, as few as make a batch possible again."""
        bound, batch_size = self._settings.staleness_bound, self._settings.batch_size
        live = _leased(self._live_at)
        if staleness.excess(live, version=version, bound=bound, batch_size=batch_size) <= 0:
            return []
        doomed: list[Unit] = []
        for unit in self.oldest_first():
            doomed.append(unit)
            assert unit.order is not None  # what has no lease is in nobody's way
            live[unit.order[0]] -= unit.size
            if staleness.excess(live, version=version, bound=bound, batch_size=batch_size) <= 0:
                break
        return doomed

    def _index_ready(self, unit: Unit) -> None:
        assert unit.order is not None
        heapq.heappush(self._ready, (unit.order, unit.unit_id))
        self._ready_at[_version(unit)] += unit.size
        self._num_ready += 1
        self._index_last_version(unit)

    def _leave_ready(self, unit: Unit) -> None:
        _shift(self._ready_at, _version(unit), -unit.size)
        self._num_ready -= 1

    def _index_last_version(self, unit: Unit) -> None:
        last = self._last_version(unit)
        if last is not None:
            heapq.heappush(self._last_versions, (last, unit.unit_id))

    def _last_version(self, unit: Unit) -> int | None:
        if unit.stage is Stage.ASSEMBLING and self._mode != "drop":
            return None  # a member still to come may be fresh; in `drop`, one that is stale dooms the group already
        spans = [(sample.oldest_version, sample.newest_version) for sample in groups.usable(unit)]
        if not spans:
            return None
        return staleness.last_version(spans, bound=self._settings.staleness_bound, mode=self._mode)


def _version(unit: Unit) -> int | None:
    return None if unit.order is None else unit.order[0]


def _leased(counts: Counter[int | None]) -> Counter[int]:
    """Counts without the samples that have no lease."""
    return Counter({issued_at: count for issued_at, count in counts.items() if issued_at is not None})


def _shift(counts: Counter[int | None], key: int | None, step: int) -> None:
    counts[key] += step
    if not counts[key]:
        del counts[key]
