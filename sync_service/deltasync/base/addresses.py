"""Addresses of hosts and ports, and whether a service may listen on one."""

import ipaddress
import re
import urllib.parse

from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput

MAX_PORT = 65_535

_PORT = re.compile(r"[0-9]{1,5}")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def host_and_port(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT."""
    text = address.strip()
    scheme, separator, rest = text.rpartition("://")
    if separator:
        raise InvalidInput(f"{text!r}: expected HOST:PORT, without {scheme}://")
    host, _, port = rest.rpartition(":")
    if not host:
        raise InvalidInput(f"{text!r}: expected HOST:PORT, such as localhost:50051")
    if not (_PORT.fullmatch(port) and 1 <= int(port) <= MAX_PORT):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, with a port from 1 to {MAX_PORT}")
    if _is_ipv6(host):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, and IPv6 in brackets: [{host}]:{port}")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not (_is_ipv6(bare) or _NAME.fullmatch(host)):
        raise InvalidInput(f"{text!r}: expected HOST:PORT, where {host!r} is neither a name nor an IP address")
    return bare or host, int(port)


def listening_host(host: str) -> str:
    """The host of `--host` in the form that all servers need: IPv6 without brackets, 127.0.0.1 for `localhost`.

    Servers resolve `localhost` differently: only some listen on ::1.
    """
    host = host.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return "127.0.0.1" if host == "localhost" else host


def with_port(host: str, port: int) -> str:
    """Join host and port: `127.0.0.1:8080`, or `[::1]:8080` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_url(address: str) -> bool:
    """Whether an address is an HTTP URL: http://HOST:PORT or https://HOST:PORT."""
    try:
        url = urllib.parse.urlsplit(address)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not url.username
    except ValueError:  # For example, one bracket of an IPv6 address is missing, or the port is not a number.
        return False


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address: 127.0.0.0/8, ::1 and `localhost`.

    Other names do not count, because they may later resolve to another address.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_listen(host: str, *, tls: bool, roles: bool, insecure: bool) -> Decision:
    """Decide whether a service may listen on an address. If it may, the reason is a warning or empty.

    `insecure`: the operator allows it without TLS and roles.
    """
    lacks = " and without ".join([*([] if tls else ["TLS"]), *([] if roles else ["roles"])])
    if is_loopback(host) or not lacks:
        return Decision(True, "")
    text = f"listening on {host} without {lacks}"
    harm = "anyone who can reach it may publish and read all rows" if not roles else "tokens and rows can be read"
    if insecure:
        return Decision(True, f"{text}: {harm}")
    return Decision(
        False,
        f"{text}: {harm}. Set --tls-cert, --tls-key and --roles, or --host 127.0.0.1; or set --insecure if the "
        "network keeps others out",
    )
