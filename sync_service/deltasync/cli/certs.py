"""`deltasync certs`."""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import click
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.cli.config import CONTEXT
from deltasync.cli.output import say

_SERVICE = "service"
# Local names: commands ask 127.0.0.1 by default.
_LOCAL = ("localhost", "127.0.0.1", "::1")
_CA = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "deltasync, for a trial")])
# Signs certificates and nothing else.
_SIGNS = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
_HOST = re.compile("[A-Za-z0-9*_][A-Za-z0-9_.-]*")


@click.command(context_settings=CONTEXT)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Further name or address of the service besides localhost, 127.0.0.1 and ::1. May be repeated.",
)
@click.option(
    "--client",
    "clients",
    multiple=True,
    metavar="NAME",
    help="Also make a certificate for this client. May be repeated.",
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="NAME=HOST,HOST",
    help="Also make a certificate for a server, such as a broker, with these host names. May be repeated.",
)
@click.option("--days", type=click.IntRange(1), default=30, help="Days until the certificates expire.")
def certs(folder: Path, hosts: Sequence[str], clients: Sequence[str], servers: Sequence[str], days: int) -> None:
    """Make a CA and certificates for the service and its clients, for a trial.

    DIR gets ca.pem, which all sides trust, service.pem and service-key.pem, and NAME.pem and NAME-key.pem for each
    client and each other server. The CA's key is not kept, so adding a certificate later needs a new CA.
    """
    expiry = datetime.now(UTC) + timedelta(days=days)
    try:
        names = dict.fromkeys([*hosts, *_LOCAL])
        write_certificates(folder, list(names), clients, expiry, dict(map(_server, servers)))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    client_ca = f" --tls-client-ca {folder}/ca.pem" if clients else ""
    say(
        f"for a trial, until {expiry:%Y-%m-%dT%H:%M:%SZ}: {folder}",
        f"  service  --tls-cert {folder}/service.pem --tls-key {folder}/service-key.pem{client_ca}",
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
    """Make a CA and certificates for a service, clients and other servers with the host names of each."""
    others = [*clients, *servers]
    for name in others:
        check_name("client", name)
    if _SERVICE in others or "ca" in others or len(set(others)) < len(others):
        raise InvalidInput("clients and servers: expected distinct names other than 'service' and 'ca'")
    named = {_SERVICE: hosts, **{client: [client] for client in clients}, **servers}
    try:
        contents = dict(_contents(named, expiry))
    except ValueError as error:
        raise InvalidInput(f"a name is not allowed in a certificate: {error}") from error
    if there := next((name for name in contents if (folder / name).exists()), None):
        raise InvalidInput(f"{folder / there} exists; choose another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in contents.items():
        _write(folder / name, content, mode=0o600 if name.endswith("-key.pem") else 0o644)


def _contents(named: Mapping[str, Sequence[str]], expiry: datetime) -> Iterator[tuple[str, bytes]]:
    """The name and content of each file. `named` has the host names of each certificate."""
    ca_key = ec.generate_private_key(ec.SECP256R1())
    yield "ca.pem", _certificate(_CA, ca_key, ca_key, expiry, x509.BasicConstraints(True, 0), _SIGNS)
    for name, names in named.items():
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        key, hosts = ec.generate_private_key(ec.SECP256R1()), x509.SubjectAlternativeName(map(_host, names))
        yield f"{name}.pem", _certificate(subject, key, ca_key, expiry, hosts)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        yield f"{name}-key.pem", private


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    expiry: datetime,
    *extensions: x509.ExtensionType,
) -> bytes:
    builder = x509.CertificateBuilder(_CA, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_after(expiry).not_valid_before(datetime.now(UTC) - timedelta(hours=1))
    for each in (
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
        *extensions,
    ):
        builder = builder.add_extension(each, critical=isinstance(each, x509.BasicConstraints | x509.KeyUsage))
    return builder.sign(ca_key, SHA256()).public_bytes(Encoding.PEM)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not _HOST.fullmatch(name):
            raise ValueError(f"{name!r} is neither a host nor an IP address") from None
        return x509.DNSName(name)


def _write(path: Path, content: bytes, *, mode: int) -> None:
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error
