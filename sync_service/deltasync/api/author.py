"""Who asks for a change: the name that a call gives, and where it comes from. It proves nothing."""

from collections.abc import Mapping
from urllib.parse import unquote

from deltasync.core.errors import InvalidInput

# Metadata of gRPC, a header of HTTP.
_KEY = "deltasync-by"
_LONGEST = 128


def author(sent: Mapping[str, str | bytes], address: str) -> str:
    """Who sends a call from an address with this metadata, or with these headers.

    Raises:
        InvalidInput: a name that is too long, or is not printable.
    """
    name = str(sent.get(_KEY, ""))
    if len(name) > _LONGEST or not name.isprintable():
        raise InvalidInput(f"{_KEY}: expected at most {_LONGEST} printable characters")
    return f"{name} ({address})" if name else address


def peer_address(peer: str) -> str:
    """The address of what gRPC calls a peer: `127.0.0.1:4711` of `ipv4:127.0.0.1:4711`."""
    return unquote(peer.partition(":")[2] or peer)
