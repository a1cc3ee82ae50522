"""What peers may take of a service: the limits, and how many streams there are and how often one is opened."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deltasync.access.roles import Identity
from deltasync.base.errors import InvalidInput, LimitReached


def _limit(most: int, what: str, *, fixed: bool = False) -> Any:
    return field(default=most, metadata={"what": what, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits. Each field's metadata says of `what` it is the largest number, and whether it is `fixed` while
    the service runs.
    """

    models: int = _limit(1_000, "models")
    tables_per_model: int = _limit(10_000, "tables of a model")
    bytes_per_model: int = _limit(16 << 40, "bytes of a model's tables")
    bytes_in_all: int = _limit(64 << 40, "bytes of all models' tables")
    consumers: int = _limit(2_000, "consumers")
    replicas_per_consumer: int = _limit(5_000, "replicas of a consumer")
    rows_per_table: int = _limit(1 << 40, "rows of a table")
    shards_per_open: int = _limit(100_000, "shards of one open")
    opens_per_second: int = _limit(500, "streams opened in a second")
    opens_per_second_per_peer: int = _limit(250, "streams opened in a second by a peer")
    streams: int = _limit(1_000, "streams")
    streams_per_peer: int = _limit(400, "streams of a peer")
    streams_without_role: int = _limit(100, "streams of all peers that have no role")
    message_bytes: int = _limit(4 << 20, "bytes of a message", fixed=True)
    outstanding_bytes: int = _limit(64 << 20, "bytes sent to a replica that it has not acknowledged")
    grpc_connections: int = _limit(2_000, "connections of gRPC", fixed=True)
    http_connections: int = _limit(512, "connections of HTTP")
    http_connections_per_peer: int = _limit(256, "connections of HTTP from one address")
    http_idle_seconds: int = _limit(30, "seconds that a connection of HTTP may wait for its peer")
    grpc_idle_seconds: int = _limit(300, "seconds that a connection of gRPC may have no call", fixed=True)
    log_queue_bytes: int = _limit(128 << 20, "bytes that wait to be written to the log")

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if type(most) is not int or most < 1:
                raise InvalidInput(f"limit {name}: {most!r}, expected a whole number from 1 on")

    @classmethod
    def described(cls, settings: object) -> "LimitOptions":
        """The limits that a table of a configuration describes; those that it leaves out have their defaults.

        Raises:
            InvalidInput: a limit that there is not, or that is no number.
        """
        if not isinstance(settings, Mapping):
            raise InvalidInput("limits: expected a table of limits by name")
        known = [each.name for each in fields(cls)]
        if unknown := sorted(settings.keys() - set(known)):
            raise InvalidInput(f"unknown limit {unknown[0]!r}; limits: {', '.join(known)}")
        return cls(**settings)

    def within(self, files: int) -> "LimitOptions":
        """These, with no more connections than a process can have that may have so many `files` open: a quarter is
        for its own. Both kinds are lowered by the same share.
        """
        most, wanted = files * 3 // 4, self.http_connections + self.grpc_connections
        if wanted <= most:
            return self
        http, grpc = (max(1, each * most // wanted) for each in (self.http_connections, self.grpc_connections))
        return replace(self, http_connections=http, grpc_connections=grpc)

    @property
    def by_name(self) -> dict[str, int]:
        """Each by name, and what follows from them."""
        return vars(self) | {"receive_bytes": self.receive_bytes}

    @property
    def receive_bytes(self) -> int:
        """The most memory that messages take while they come in: each stream may have one under way."""
        return self.streams * self.message_bytes


class Limits:
    """The limits, and the one place that knows how much there is of what they limit. Used in the event loop.

    Attributes:
        options: the limits; replaced when the configuration is read again, which takes nothing from who has it.
        refused: how often a limit was reached since the start, by its name.
    """

    def __init__(self, options: LimitOptions | None = None) -> None:
        self.options = options or LimitOptions()
        self._added = Counter[str]()
        self._counts = dict[str, Callable[[], int]]()
        self.refused = Counter[str]()

    def count(self, name: str, count: Callable[[], int]) -> None:
        """Ask `count` how much there is of what a limit limits, beside what was added here."""
        self._counts[name] = count

    def number(self, name: str) -> int:
        """How much there is of what a limit limits."""
        return self._added[name] + (self._counts[name]() if name in self._counts else 0)

    @property
    def numbers(self) -> dict[str, int]:
        """How much there is of everything that has a limit and is counted, by the limit's name."""
        found = {name: self.number(name) for name in {*self._added, *self._counts}}
        return found | {"receive_bytes": self.number("streams") * self.options.message_bytes}

    def copy(self) -> "Limits":
        """The same, which does not change any more."""
        copy = Limits(self.options)
        copy._added, copy.refused = Counter(self.numbers), Counter(self.refused)
        return copy

    def take(self, options: LimitOptions) -> str:
        """Take over other limits but for those that are fixed; what has changed, in words."""
        before, after = vars(self.options), vars(options)
        fixed = {each.name for each in fields(LimitOptions) if each.metadata["fixed"]}
        self.options = replace(options, **{name: before[name] for name in fixed})
        changed = [name for name in after if after[name] != before[name]]
        words = [f"limit {name}: {after[name]}, was {before[name]}" for name in changed if name not in fixed]
        later = [f"limit {name}: {after[name]} from the next start on" for name in changed if name in fixed]
        return "; ".join(words + later)

    def check(self, name: str, number: int) -> None:
        """Check that there may be so many of what a limit is of.

        Raises:
            LimitReached: there may not; the message names the limit.
        """
        most = getattr(self.options, name)
        if number > most:
            self.refused[name] += 1
            text = f"{_what(name)}: at most {most} are allowed (limit {name})"
            raise LimitReached(text, detail=f"; these would be {number}")

    def check_more(self, name: str, more: int = 1) -> None:
        """Check that there may be some more of what a limit limits.

        Raises:
            LimitReached: there may not; the message names the limit.
        """
        if more > 0:  # A limit that has become lower takes nothing from those who have it.
            self.check(name, self.number(name) + more)

    def add(self, name: str, number: int = 1) -> None:
        """Count some more of what a limit limits, or less, until it is taken back."""
        self._added[name] += number

    @contextmanager
    def taking(self, name: str, number: int = 1) -> Iterator[None]:
        """Count some more of what a limit limits while the block runs.

        Raises:
            LimitReached: there would be too many.
        """
        self.check_more(name, number)
        self.add(name, number)
        try:
            yield
        finally:
            self.add(name, -number)


def _what(name: str) -> str:
    return next(str(each.metadata["what"]) for each in fields(LimitOptions) if each.name == name)


@dataclass(frozen=True)
class TokenBucket:
    """What is left of one: `tokens`, at the time `seconds` of a clock that is never set back."""

    tokens: float
    seconds: float

    @classmethod
    def full(cls, rate: int, now: float) -> "TokenBucket":
        """One from which nothing was taken."""
        return cls(float(rate), now)

    def take(self, rate: int, now: float) -> "TokenBucket | None":
        """What is left once one token is taken; None where there is none, and nothing is taken.

        Args:
            rate: tokens that come in a second, and the most that it holds.
            now: the time, not before that of this one.
        """
        tokens = min(float(rate), self.tokens + (now - self.seconds) * rate)
        return TokenBucket(tokens - 1, now) if tokens >= 1 else None

    def is_full(self, rate: int, now: float) -> bool:
        """Whether it is as one from which nothing was taken."""
        return self.tokens + (now - self.seconds) * rate >= rate


# Of all peers. No peer is called that.
_ALL = ""
# So many peers are remembered that may have opened none for a while.
_MOST_REMEMBERED = 1_000


class StreamLimits:
    """The streams that there are, by peer. Used in the event loop.

    Args:
        limits: what peers may take.
        now: the time in seconds, of a clock that is never set back.
    """

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._streams = Counter[str]()
        self._opens = dict[str, TokenBucket]()

    @contextmanager
    def taking(self, peer: str, *, without_role: bool = False) -> Iterator[None]:
        """Have one stream of a peer more, while the block runs. Of peers `without_role`, who may ask whether the
        service is healthy, all together have few: else they took those of all others.

        Raises:
            LimitReached: there would be too many, or they come too fast.
        """
        self._note_open(peer, "opens_per_second_per_peer")  # First: what one is refused, the others do not lack.
        self._note_open(_ALL, "opens_per_second")
        self._limits.check("streams_per_peer", self._streams[peer] + 1)
        with self._limits.taking("streams_without_role", int(without_role)), self._limits.taking("streams"):
            self._streams[peer] += 1
            try:
                yield
            finally:
                self._streams[peer] -= 1
                if not self._streams[peer]:
                    del self._streams[peer]

    def _note_open(self, peer: str, limit: str) -> None:
        rate, now = getattr(self._limits.options, limit), self._now()
        left = self._opens.get(peer, TokenBucket.full(rate, now)).take(rate, now)
        self._limits.check(limit, rate + (left is None))
        if left:
            self._opens[peer] = left
        if len(self._opens) > _MOST_REMEMBERED:
            self._opens = {name: each for name, each in self._opens.items() if not each.is_full(rate, now)}


def peer_of(identity: Identity) -> str:
    """What counts as one peer: a name, where it has shown one, at an address."""
    host, _, port = identity.address.rpartition(":")
    return f"{identity.name} {network_of(host if port else identity.address)}"


def network_of(host: str) -> str:
    """What counts as one address; of IPv6 a network of 64 bits, all of whose addresses one machine may have."""
    host = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        address = address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False).network_address
    return str(address)
