"""The seal of a cut, which makes it a version of a history."""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from numbers import Integral
from typing import Any

from deltasync.base.clock import Moment, Succession
from deltasync.base.errors import InvalidInput
from deltasync.core.position import Position


@dataclass(frozen=True, kw_only=True)
class Seal:
    """The metadata of a sealed cut. Times are nanoseconds since 1970.

    `bytes` is the size of ids and values, `log_bytes` that of the cut's records in the log. `resync`: the run does
    not continue the published history and has every row. `whole` lists the tables of a full cut, which deletes the
    rows it does not contain. `event_time_unix_ns` is the time of the newest event on which the run was trained;
    None if no rank reported one. `rollback_of` is the earlier version whose rows a rollback has brought back; None
    if trainers published the cut. `accepts_any`: the operator who rolled back admits runs that do not say which
    version they build on. `checksum` covers this seal and the previous checksum, so that histories which diverge
    have different checksums from there on.
    """

    version: int
    step: int
    run: str
    run_started_unix_ns: int
    world_size: int
    rows: int
    bytes: int
    log_bytes: int
    step_end_unix_ns: int
    sealed_unix_ns: int
    resync: bool = False
    whole: tuple[str, ...] = ()
    event_time_unix_ns: int | None = None
    rollback_of: int | None = None
    accepts_any: bool = False
    checksum: int = 0

    @property
    def at_once(self) -> bool:
        """Whether replicas must get all its rows in one release, because its rows match only each other."""
        return self.resync or self.rollback_of is not None

    def after(self, before: "Seal | None") -> "Seal":
        """Return this seal with the checksum that chains it to the seal `before`; None for the first cut."""
        chained = before.checksum if before else 0
        text = f"{chained} {self.version} {self.step} {self.run} {self.rows} {self.bytes} {self.sealed_unix_ns}"
        return replace(self, checksum=_checksum(text))


def seal_of_record(record: Mapping[str, Any]) -> Seal:
    """The seal that a record, made by `asdict`, describes."""
    return Seal(**{**record, "whole": tuple(record["whole"])})


class SealHistory(deque[Seal]):
    """The seals of a model's last cuts, oldest first. Seals are only added at the end.

    Attributes:
        succession: when each version became the newest, since the service started.
        rollbacks: the seals of rollbacks among them, and some older ones.
    """

    def __init__(self, seals: Iterable[Seal] = (), maxlen: int | None = None) -> None:
        super().__init__((), maxlen)
        self.succession = Succession()
        self.rollbacks = list[Seal]()
        self._frozen: tuple[Seal, ...] = ()
        self.extend(seals)

    def append(self, seal: Seal) -> None:
        """Add the newest seal."""
        super().append(seal)
        if seal.rollback_of is not None:
            self.rollbacks.append(seal)

    def extend(self, seals: Iterable[Seal]) -> None:
        """Add seals, oldest first."""
        for each in seals:
            self.append(each)

    def rolled_back_by(self, version: int) -> Seal | None:
        """The rollback that discarded a version; None if the newest version builds on it."""
        last = self.newest_version
        for rollback in reversed(self.rollbacks):
            if rollback.version > last:
                continue  # A later rollback discarded this one.
            if version >= rollback.version:
                return None
            last = rollback.rollback_of or 0
            if version > last:
                return rollback
        return None

    def same_rows(self, position: Position) -> Position:
        """The position of the newest rollback to a position, which has the same rows; else the position itself."""
        if not position.seal or self.checksum_of(position.number) != position.seal:
            return position
        for each in reversed(self.rollbacks):
            if each.rollback_of == position.number and not self.rolled_back_by(each.version):
                return replace(position, number=each.version, seal=each.checksum)
        return position

    @property
    def newest(self) -> Seal | None:
        """The last seal; None before the first cut."""
        return self[-1] if self else None

    @property
    def newest_version(self) -> int:
        """The last version; 0 before the first cut."""
        return self[-1].version if self else 0

    def frozen(self) -> tuple[Seal, ...]:
        """The present seals; the same tuple until the next seal."""
        if not self._frozen or self._frozen[-1] is not self.newest:
            self._frozen = tuple(self)
        return self._frozen

    def checksum_of(self, version: int) -> int:
        """The checksum of a version's seal; 0 if unknown."""
        return checksum_of(self, version)

    def sealed_at(self, version: int) -> Moment:
        """When a version was sealed, or the oldest known one if its seal is no longer kept."""
        return Moment(seal_of(version, self).sealed_unix_ns, self.succession.since_ns(version))

    def outdated(self, version: int) -> Moment | None:
        """When the version after this one was sealed; None if there is none."""
        return self.sealed_at(version + 1) if version < self.newest_version else None

    def after(self, version: int) -> list[Seal]:
        """The seals of later versions, oldest first."""
        newest_first = takewhile(lambda seal: seal.version > version, reversed(self))
        return list(newest_first)[::-1]


def release_checksum(before: int | str, number: int, of: Seal, made_unix_ns: int) -> int:
    """The checksum of a release's seal, chained like those of versions to `before`: the checksum of the previous
    release or, for the first one, the id of its history. The time distinguishes releases in different
    histories.
    """
    return _checksum(f"{before} {number} {of.version} {of.checksum} {made_unix_ns}")


def _checksum(said: str) -> int:
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest()) or 1


def seconds_since_sealed(version: int, seals: Sequence[Seal], now_unix_ns: int) -> float:
    """Seconds since a version was sealed; 0 if it is not sealed yet."""
    if not seals or version > seals[-1].version:
        return 0.0
    return round(max(0, now_unix_ns - seal_of(version, seals).sealed_unix_ns) / 1e9, 3)


def seal_of(version: int, seals: Sequence[Seal]) -> Seal:
    """The seal of a version, or the nearest known one."""
    return seals[min(max(0, version - seals[0].version), len(seals) - 1)]


def checksum_of(seals: Sequence[Seal], version: int) -> int:
    """The checksum of a version's seal; 0 if unknown."""
    has_seal = seals and seals[0].version <= version <= seals[-1].version
    return seal_of(version, seals).checksum if has_seal else 0


def event_time_of(version: int, seals: Sequence[Seal]) -> int | None:
    """The time of the newest event on which a version was trained, nanoseconds since 1970.

    None if unknown: no rank reported it, or the version's seal is no longer kept.
    """
    if not seals or not seals[0].version <= version <= seals[-1].version:
        return None
    return seal_of(version, seals).event_time_unix_ns


_LAST = 2**63 - 1


def newest_event_time(times: Iterable[int | None]) -> int | None:
    """The newest of some times, nanoseconds since 1970; None if all are unknown."""
    return max((time for time in times if time is not None), default=None)


def check_event_time(event_time_unix_ns: Any) -> None:
    """Check that the time of an event is valid or None."""
    if event_time_unix_ns is None:
        return
    whole = isinstance(event_time_unix_ns, Integral) and not isinstance(event_time_unix_ns, bool)
    if not whole or not 1 <= int(event_time_unix_ns) <= _LAST:
        raise InvalidInput(
            f"event_time_unix_ns: {event_time_unix_ns!r}, expected whole nanoseconds since 1970, or None"
        )


def seconds_behind(event_time_unix_ns: int | None, now_unix_ns: int) -> float | None:
    """Seconds since an event; 0 if a fast clock dates it in the future."""
    return None if event_time_unix_ns is None else round(max(0, now_unix_ns - event_time_unix_ns) / 1e9, 3)
