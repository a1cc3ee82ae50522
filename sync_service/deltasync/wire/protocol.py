"""Versions of the protocol: which ones a side understands, and whether client and service have one in common."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deltasync.core.errors import InvalidInput
from deltasync.core.position import Decision

# What this code speaks, and the oldest that it still understands: 1, whose clients named no version.
PROTOCOL = 7
OLDEST_PROTOCOL = 1
# The first in which rows can be deleted. To others a delete is a row of zeros.
DELETES_PROTOCOL = 3
# The first that knows the value types made for an inference TBE.
TBE_PROTOCOL = 4
# The first in which a part, or a release, whose rows fit one message is one.
WHOLE_PROTOCOL = 5
# The first whose positions name their seals.
SEALS_PROTOCOL = 6
# The first whose replicas read all that they hold again when they are asked to.
READ_AGAIN_PROTOCOL = 7
# Of an HTTP answer of all processes: names those that had no part in it.
MISSING_HEADER = "deltasync-missing"

_KEY = "deltasync-protocol"
_FORM = re.compile(r"([1-9][0-9]{0,8})-([1-9][0-9]{0,8})", re.ASCII)
_SHOWN = 40


@dataclass(frozen=True)
class Protocols:
    """The versions that one side understands, from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol {self.newest}"
        return f"protocols {self.oldest} to {self.newest}"


OURS = Protocols(OLDEST_PROTOCOL, PROTOCOL)
_UNSAID = Protocols(1, 1)


def agree(client: Protocols, service: Protocols) -> Decision:
    """Whether a client and a service understand each other; if not, which of them is to be updated."""
    both = f"the client speaks {client}, the service {service}"
    if client.oldest > service.newest:
        return Decision(False, f"{both}: update the service")
    if client.newest < service.oldest:
        return Decision(False, f"{both}: update the client")
    return Decision(True, both)


def protocols_to_metadata(protocols: Protocols) -> tuple[str, str]:
    """The entry of a call's metadata that says what a client understands."""
    return _KEY, f"{protocols.oldest}-{protocols.newest}"


def protocols_from_metadata(metadata: Mapping[str, str | bytes]) -> Protocols:
    """What the client of a call understands.

    Raises:
        InvalidInput: the entry is not OLDEST-NEWEST.
    """
    said = metadata.get(_KEY)
    if said is None:
        return _UNSAID
    found = _FORM.fullmatch(str(said))
    if found is None or int(found[1]) > int(found[2]):
        raise InvalidInput(f"{_KEY}: {str(said)[:_SHOWN]!r}, expected OLDEST-NEWEST, two numbers from 1")
    return Protocols(int(found[1]), int(found[2]))
