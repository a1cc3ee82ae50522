"""Limits for peers, and the current use of each."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from deltasync.access.roles import Identity
from deltasync.base.errors import InvalidInput, LimitReached
from deltasync.base.settings import changed, setting, settings_in


def _limit(most: int, what: str, *, fixed: bool = False) -> int:
    return setting(most, what, reload=not fixed)


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits, each declared with what it limits, and whether it is `fixed` while the service runs."""

    models: int = _limit(1_000, "models")
    tables_per_model: int = _limit(10_000, "tables of a model")
    bytes_per_model: int = _limit(16 << 40, "bytes of a model's tables")
    bytes_in_all: int = _limit(64 << 40, "bytes of all models' tables")
    consumers: int = _limit(2_000, "consumers")
    replicas_per_consumer: int = _limit(5_000, "replicas of a consumer")
    rows_per_table: int = _limit(1 << 40, "rows of a table")
    shards_per_open: int = _limit(100_000, "shards in one open")
    opens_per_second: int = _limit(500, "streams opened per second")
    opens_per_second_per_peer: int = _limit(250, "streams opened per second by one peer")
    streams: int = _limit(1_000, "streams")
    streams_per_peer: int = _limit(400, "streams of one peer")
    streams_without_role: int = _limit(100, "streams of all peers without a role")
    message_bytes: int = _limit(4 << 20, "bytes of a message", fixed=True)
    outstanding_bytes: int = _limit(64 << 20, "bytes sent to a replica and not yet acknowledged")
    grpc_connections: int = _limit(2_000, "gRPC connections", fixed=True)
    http_connections: int = _limit(512, "HTTP connections")
    http_connections_per_peer: int = _limit(256, "HTTP connections from one address")
    http_idle_seconds: int = _limit(30, "seconds that an HTTP connection may wait for its peer")
    grpc_idle_seconds: int = _limit(300, "seconds that a gRPC connection may be without a call", fixed=True)
    log_queue_bytes: int = _limit(128 << 20, "bytes waiting to be written to the log")

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if type(most) is not int or most < 1:
                raise InvalidInput(f"limit {name}: {most!r}, expected a whole number of at least 1")

    @classmethod
    def read(cls, table: object, flags: Mapping[str, str]) -> "LimitOptions":
        """The limits of the configuration's table and of flags, which win; a missing one has its default."""
        if not isinstance(table, Mapping):
            raise InvalidInput("limits: expected a table of limits by name")
        numbers = {
            name: int(text) if text.isdecimal() and len(text) < 20 else text for name, text in flags.items()
        }
        names = [each.name for each in settings_in(cls)]
        if unknown := sorted({*table, *flags} - set(names)):
            raise InvalidInput(f"unknown limit {unknown[0]!r}; limits: {', '.join(names)}")
        return cls(**{**table, **numbers})

    def within(self, files: int) -> "LimitOptions":
        """These limits, with fewer connections if the process may not open enough `files`.

        A quarter of the files is for the process itself. Both kinds of connections shrink by the same factor.
        """
        most, connections = files * 3 // 4, self.http_connections + self.grpc_connections
        if connections <= most:
            return self
        http, grpc = (
            max(1, each * most // connections) for each in (self.http_connections, self.grpc_connections)
        )
        return replace(self, http_connections=http, grpc_connections=grpc)

    @property
    def by_name(self) -> dict[str, int]:
        """Each limit, and those derived from them, by name."""
        return vars(self) | {"receive_bytes": self.receive_bytes}

    @property
    def receive_bytes(self) -> int:
        """The most memory for incoming messages, at one per stream."""
        return self.streams * self.message_bytes


class Limits:
    """The limits, the current use of each, and the refusals since the start. For the event loop."""

    def __init__(self, options: LimitOptions | None = None) -> None:
        self.options = options or LimitOptions()
        self._added = Counter[str]()
        self._counts = dict[str, Callable[[], int]]()
        self.refused = Counter[str]()

    def count(self, name: str, count: Callable[[], int]) -> None:
        """Register a function that returns the use of a limit, in addition to `add`."""
        self._counts[name] = count

    def number(self, name: str) -> int:
        """The current use of a limit."""
        return self._added[name] + (self._counts[name]() if name in self._counts else 0)

    @property
    def numbers(self) -> dict[str, int]:
        """The current use of every counted limit, by name."""
        used = {name: self.number(name) for name in {*self._added, *self._counts}}
        return used | {"receive_bytes": self.number("streams") * self.options.message_bytes}

    def copy(self) -> "Limits":
        """A snapshot."""
        copy = Limits(self.options)
        copy._added, copy.refused = Counter(self.numbers), Counter(self.refused)
        return copy

    def take(self, options: LimitOptions) -> str:
        """Switch to other limits, except fixed ones; return the changes in words. Peers lose nothing by it."""
        before, after = vars(self.options), vars(options)
        now, later = changed(self.options, options)
        self.options = replace(self.options, **{name: after[name] for name in now})
        words = [f"limit {name}: {after[name]}, was {before[name]}" for name in now]
        return "; ".join([*words, *(f"limit {name}: {after[name]} after the next start" for name in later)])

    def check(self, name: str, number: int) -> None:
        """Check a number against a limit."""
        most = getattr(self.options, name)
        if number > most:
            self.refused[name] += 1
            text = f"{_what(name)}: at most {most} are allowed (limit {name})"
            raise LimitReached(text, detail=f"; these would be {number}")

    def check_more(self, name: str, more: int = 1) -> None:
        """Check that a limit allows `more` on top of its current use."""
        if more > 0:  # A lowered limit takes nothing from its current users.
            self.check(name, self.number(name) + more)

    def add(self, name: str, number: int = 1) -> None:
        """Add to the current use of a limit; a negative number takes it back."""
        self._added[name] += number

    @contextmanager
    def taking(self, name: str, number: int = 1) -> Iterator[None]:
        """Add to the current use of a limit while the block runs."""
        self.check_more(name, number)
        self.add(name, number)
        try:
            yield
        finally:
            self.add(name, -number)


@cache
def _what(name: str) -> str:
    return next(each.help for each in settings_in(LimitOptions) if each.name == name)


@dataclass(frozen=True)
class TokenBucket:
    """A token bucket with `tokens` left at the time `seconds` of a monotonic clock."""

    tokens: float
    seconds: float

    @classmethod
    def full(cls, rate: int, now: float) -> "TokenBucket":
        """A full bucket."""
        return cls(float(rate), now)

    def take(self, rate: int, now: float) -> "TokenBucket | None":
        """The bucket after taking one token; None if it has none. `rate` per second is also the capacity."""
        tokens = min(float(rate), self.tokens + (now - self.seconds) * rate)
        return TokenBucket(tokens - 1, now) if tokens >= 1 else None

    def is_full(self, rate: int, now: float) -> bool:
        """Whether the bucket is full."""
        return self.tokens + (now - self.seconds) * rate >= rate


# The key for all peers together; no peer has this name.
_ALL = ""
# Number of buckets beyond which the full ones are dropped.
_MOST_REMEMBERED = 1_000


class StreamLimits:
    """The open streams by peer. For the event loop."""

    def __init__(self, limits: Limits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._streams = Counter[str]()
        self._opens = dict[str, TokenBucket]()

    @contextmanager
    def taking(self, peer: str, *, without_role: bool = False) -> Iterator[None]:
        """Count a stream of a peer while the block runs.

        Peers `without_role` may only ask for the service's health. They share a small limit, or they could use up
        the streams of all others.
        """
        self._note_open(peer, "opens_per_second_per_peer")  # First, as a refusal must not cost other peers tokens.
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
    """The peer of a caller: its address, and its identity if authenticated."""
    host, _, port = identity.address.rpartition(":")
    return f"{identity.name} {network_of(host if port else identity.address)}"


def network_of(host: str) -> str:
    """The address; for IPv6 its /64, as one machine may have all addresses in it."""
    host = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        address = address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False).network_address
    return str(address)
