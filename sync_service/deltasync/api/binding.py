"""Addresses that cannot be listened on, in words."""

import errno
import socket


def not_bound(option: str, host: str, port: int, error: OSError | None = None) -> str:
    """Why the port of an option could not be had, and what to do."""
    if error and (isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL):
        return f"cannot listen on {host}: {error.strerror}: choose a --host that is an address of this machine"
    return f"cannot listen on {host}:{port}: choose another {option}, or 0 for any free one"
