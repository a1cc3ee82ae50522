"""How many streams there may be, and how often one may be opened: of each peer, and of all."""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deltasync.core.access import Identity
from deltasync.core.limits import Limits
from deltasync.core.token_bucket import TokenBucket

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
