"""What others reach: the addresses that a service listens on, and the files that it reads."""

import ipaddress
import stat
from pathlib import Path

from deltasync.core.errors import InvalidInput
from deltasync.core.position import Decision


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address: 127.0.0.0/8, ::1 and `localhost`; no other name, for who says
    where that leads, may change it.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_listen(host: str, *, tls: bool, roles: bool, insecure: bool) -> Decision:
    """Whether a service may listen on an address with what protects it, and why; with a yes that is a warning.

    Args:
        host: the address.
        tls: whether connections are encrypted, and the service shows a certificate.
        roles: whether callers have to show who they are.
        insecure: whether somebody has said that it may, whatever it lacks.
    """
    lacks = " and without ".join([*([] if tls else ["TLS"]), *([] if roles else ["roles"])])
    if is_loopback(host) or not lacks:
        return Decision(True, "")
    text = f"listening on {host} without {lacks}"
    harm = (
        "whoever reaches its ports may publish, and read all rows" if not roles else "tokens and rows can be read"
    )
    if insecure:
        return Decision(True, f"{text}: {harm}")
    return Decision(
        False,
        f"{text}: {harm}. Give it --tls-cert, --tls-key and --roles, have it listen on 127.0.0.1, or say "
        "--insecure where something else keeps others out",
    )


def readable_by_all(path: Path) -> bool:
    """Whether every user of the machine may read a file.

    Raises:
        InvalidInput: it is not there: just now it was.
    """
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
