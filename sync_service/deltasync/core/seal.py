"""The seal of a cut, which makes it a version of a history, and how long the parts of its way took."""

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from numbers import Integral
from typing import Any

from deltasync.base.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Seal:
    """What is known of a sealed cut. Times are nanoseconds since 1970.

    `bytes` are those of ids and values, `log_bytes` those of the records the log holds of it. `resync` says that
    its run does not continue the published history: it has every row. `whole` are the tables of a full cut: rows
    that it does not name are deleted. `event_time_unix_ns` is the time of the newest event that the run had been
    trained on; None if no rank has said one. `checksum` is of the seal and of the one before it, and so of all
    that came before: two histories that part have different ones from there on.
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
    checksum: int = 0

    def after(self, before: "Seal | None") -> "Seal":
        """This seal with the checksum that it has after another one; None is before the first cut."""
        chained = before.checksum if before else 0
        said = f"{chained} {self.version} {self.step} {self.run} {self.rows} {self.bytes} {self.sealed_unix_ns}"
        return replace(self, checksum=_checksum(said))


class SealHistory(deque[Seal]):
    """The seals of a model's last cuts, oldest first."""

    _frozen: tuple[Seal, ...] = ()

    @property
    def newest(self) -> Seal | None:
        """The last seal; None before the first cut."""
        return self[-1] if self else None

    @property
    def newest_version(self) -> int:
        """The last version; 0 before the first cut."""
        return self[-1].version if self else 0

    def frozen(self) -> tuple[Seal, ...]:
        """All of them as they are now; the same tuple until the next one comes."""
        if not self._frozen or self._frozen[-1] is not self.newest:
            self._frozen = tuple(self)
        return self._frozen

    def checksum_of(self, version: int) -> int:
        """The checksum of a version's seal; 0 where it is not known."""
        return checksum_of(self, version)

    def after(self, version: int) -> list[Seal]:
        """The seals of later versions, oldest first."""
        newest_first = takewhile(lambda seal: seal.version > version, reversed(self))
        return list(newest_first)[::-1]


def release_checksum(before: int | str, number: int, of: Seal, made_unix_ns: int) -> int:
    """The checksum of a release's seal, which is chained as those of versions are.

    Args:
        before: that of the release before it; of the first one, the id of the history that it begins.
        number: its number.
        of: the seal of the version that it is made of.
        made_unix_ns: when it was made: of two that one version has led to, one may be of a discarded past.
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
    """The seal of a version, or the nearest one where that is no longer kept or not there yet."""
    return seals[min(max(0, version - seals[0].version), len(seals) - 1)]


def checksum_of(seals: Sequence[Seal], version: int) -> int:
    """The checksum of a version's seal; 0 where it is not known."""
    known = seals and seals[0].version <= version <= seals[-1].version
    return seal_of(version, seals).checksum if known else 0


def event_time_of(version: int, seals: Sequence[Seal]) -> int | None:
    """The time of the newest event that the model had been trained on at a version, nanoseconds since 1970.

    None where it is not known: nobody has said it, or the version's seal is no longer kept.
    """
    if not seals or not seals[0].version <= version <= seals[-1].version:
        return None
    return seal_of(version, seals).event_time_unix_ns


_LAST = 2**63 - 1


def newest_event_time(times: Iterable[int | None]) -> int | None:
    """The newest of some times, nanoseconds since 1970; None if none is known."""
    return max((time for time in times if time is not None), default=None)


def check_event_time(event_time_unix_ns: Any) -> None:
    """See that the time of an event is one, or None.

    Raises:
        InvalidInput: it is no whole number of nanoseconds since 1970.
    """
    if event_time_unix_ns is None:
        return
    whole = isinstance(event_time_unix_ns, Integral) and not isinstance(event_time_unix_ns, bool)
    if not whole or not 1 <= int(event_time_unix_ns) <= _LAST:
        raise InvalidInput(
            f"event_time_unix_ns: {event_time_unix_ns!r}, expected whole nanoseconds since 1970, or None"
        )


def seconds_behind(event_time_unix_ns: int | None, now_unix_ns: int) -> float | None:
    """For how many seconds an event is past; 0 if a clock that is ahead dates it in the future."""
    return None if event_time_unix_ns is None else round(max(0, now_unix_ns - event_time_unix_ns) / 1e9, 3)
