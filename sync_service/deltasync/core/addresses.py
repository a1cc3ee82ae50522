"""What an address says of who can be at it."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself, whatever its networks: `localhost`, or an address of the loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
