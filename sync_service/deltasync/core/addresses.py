"""Addresses of hosts and ports: whatever takes one reads it here."""

import ipaddress
import re
import urllib.parse

from deltasync.core.errors import InvalidInput

MAX_PORT = 65_535

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def listening_host(host: str) -> str:
    """The host of `--host` as all servers take it: an IPv6 address without brackets, `localhost` as 127.0.0.1.

    Each server would resolve `localhost` by itself, and some listen on ::1 then, others not.
    """
    host = host.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return "127.0.0.1" if host == "localhost" else host


def with_port(host: str, port: int) -> str:
    """A host and a port: `127.0.0.1:8080`, or `[::1]:8080` of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT.

    Raises:
        InvalidInput: it is something else; the message says what is wrong and what it should be.
    """
    text = address.strip()
    scheme, separator, rest = text.rpartition("://")
    if separator:
        raise InvalidInput(f"{text!r}: expected HOST:PORT, without {scheme}://")
    host, _, port = rest.rpartition(":")
    if not host:
        raise InvalidInput(f"{text!r}: expected HOST:PORT, such as localhost:50051")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, with a port from 1 to {MAX_PORT}")
    if _is_ipv6(host):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, and IPv6 in brackets: [{host}]:{port}")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not (_is_ipv6(bare) or _NAME.fullmatch(host)):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, where {host!r} is no name and no address")
    return bare or host, int(port)


def is_url(address: str) -> bool:
    """Whether an address is one of HTTP: http://HOST:PORT or https://HOST:PORT."""
    try:
        url = urllib.parse.urlsplit(address)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not url.username
    except ValueError:  # Say, half of the brackets of IPv6, or a port that is none.
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
