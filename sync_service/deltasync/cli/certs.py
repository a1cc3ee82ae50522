"""`deltasync certs`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import click
import trustme

from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.cli.config import CONTEXT
from deltasync.cli.output import say

_SERVICE = "service"
# By which the machine reaches itself: commands ask 127.0.0.1 unless told otherwise.
_LOCAL = ("localhost", "127.0.0.1", "::1")


@click.command(context_settings=CONTEXT)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name or address of the service, beside localhost, 127.0.0.1 and ::1. May be repeated.",
)
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    help="Who gets a certificate too. May be repeated.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="NAME=HOST,HOST",
    help="Another server that gets a certificate, and by which names it is reached: a broker. May be repeated.",
)
@click.option("--days", type=click.IntRange(1), default=30, help="For so long they are valid.")
def certs(folder: Path, hosts: Sequence[str], clients: Sequence[str], servers: Sequence[str], days: int) -> None:
    """Make a CA, and certificates of it for the service and its clients, to try it out.

    DIR gets ca.pem, which all sides trust, service.pem and service-key.pem, and NAME.pem and NAME-key.pem for each
    client and each other server. The key of the CA is kept nowhere: another certificate takes another CA.
    """
    expiry = datetime.now(UTC) + timedelta(days=days)
    try:
        names = dict.fromkeys([*hosts, *_LOCAL])
        write_certificates(folder, list(names), clients, expiry, dict(map(_server, servers)))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    wanted = f" --tls-client-ca {folder}/ca.pem" if clients else ""
    say(
        f"for a try-out, until {expiry:%Y-%m-%dT%H:%M:%SZ}: {folder}",
        f"  service  --tls-cert {folder}/service.pem --tls-key {folder}/service-key.pem{wanted}",
        *(
            f"  {name}  --ca {folder}/ca.pem --cert {folder}/{name}.pem --key {folder}/{name}-key.pem"
            for name in clients
        ),
    )


def _server(text: str) -> tuple[str, list[str]]:
    name, _, hosts = text.partition("=")
    if not hosts:
        raise InvalidInput(f"server {text!r}: expected NAME=HOST, or NAME=HOST,HOST")
    return name, hosts.split(",")


def write_certificates(
    folder: Path,
    hosts: Sequence[str],
    clients: Sequence[str],
    expiry: datetime,
    servers: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Make a CA, and certificates for a service with some names, for some clients and for other servers with their
    names, valid until a time.

    Raises:
        InvalidInput: a name that cannot be in a certificate or be that of a file, or a file that there is already.
    """
    others = [*clients, *servers]
    for name in others:
        check_name("client", name)
    if _SERVICE in others or "ca" in others or len(set(others)) < len(others):
        raise InvalidInput("clients and servers: expected names other than 'service' and 'ca', each once")
    named = {_SERVICE: hosts, **{client: [client] for client in clients}, **servers}
    try:
        contents = dict(_contents(named, expiry))
    except ValueError as error:
        raise InvalidInput(f"a name cannot be in a certificate: {error}") from error
    if there := next((name for name in contents if (folder / name).exists()), None):
        raise InvalidInput(f"{folder / there} is there already: choose another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in contents.items():
        _write(folder / name, content, mode=0o600 if name.endswith("-key.pem") else 0o644)


def _contents(named: Mapping[str, Sequence[str]], expiry: datetime) -> Iterator[tuple[str, bytes]]:
    """Each file's name, and what is to be in it, for those who have these names."""
    ca = trustme.CA(organization_name="deltasync, for a try-out")
    yield "ca.pem", ca.cert_pem.bytes()
    for name, names in named.items():
        issued = ca.issue_cert(*names, common_name=name, not_after=expiry)
        yield f"{name}.pem", b"".join(each.bytes() for each in issued.cert_chain_pems)
        yield f"{name}-key.pem", issued.private_key_pem.bytes()


def _write(path: Path, content: bytes, *, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
