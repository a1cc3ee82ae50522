"""Sockets for asyncio to serve HTTP on."""

import socket


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens already: whoever is told of it can connect at once.

    Args:
        host: an address, of IPv4 or IPv6.
        port: 0 = one that is free.

    Raises:
        OSError: there is no such address here, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's algorithm off only for sockets that say TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
