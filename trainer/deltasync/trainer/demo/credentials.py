"""What the demo's processes show the service of themselves."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from deltasync.cli.certs import write_certificates
from deltasync.client import Endpoint
from deltasync.core.access import Grant, Role
from deltasync.core.roles import token_digest
from deltasync.trainer.demo.options import Fleet
from deltasync.trainer.demo.processes import Processes
from deltasync.trainer.demo.services import Services

ADMIN, STATUS, TRAINER = "admin", "status", "trainer"
_HOST = "127.0.0.1"
_VALID = timedelta(days=1)


class Credentials(Protocol):
    """What each process shows, by its name."""

    def start(self, processes: Processes, count: int, where: Sequence[str]) -> Services:
        """Start the service that it is shown to: so many processes, with these arguments of their log."""

    def endpoint(self, name: str) -> Endpoint:
        """Where a process reaches the service, with what it shows; once that is started."""

    def arguments(self, name: str) -> list[str]:
        """The same as arguments of a process."""


class Plain:
    """Plain text: who makes consumers shows a token, and nobody else shows anything."""

    def __init__(self) -> None:
        self._token = secrets.token_hex()

    def start(self, processes: Processes, count: int, where: Sequence[str]) -> Services:
        """See `Credentials`."""
        self._service = Services(processes, where, count, self._token)
        return self._service

    def endpoint(self, name: str) -> Endpoint:
        """See `Credentials`."""
        return Endpoint(self._service.grpc, self._token if name == ADMIN else "", http=self._service.http)

    def arguments(self, name: str) -> list[str]:  # noqa: ARG002  # all are the same
        """See `Credentials`."""
        return ["--service", self._service.grpc]


class Secure:
    """Mutual TLS and roles: each process has a certificate of its own, who asks for status has a token, and none
    has more roles than it needs.
    """

    def __init__(self, folder: Path, model: str, fleets: Sequence[Fleet]) -> None:
        self._folder = folder
        self._certificates = folder / "certificates"
        grants = _grants(model, fleets)
        write_certificates(self._certificates, [_HOST], list(grants), datetime.now(UTC) + _VALID)
        token = secrets.token_urlsafe()
        for name, content in (("status-token", token), ("roles.toml", _roles(grants, token))):
            (folder / name).touch(0o600)
            (folder / name).write_text(content)
        self._names = list(grants)

    def start(self, processes: Processes, count: int, where: Sequence[str]) -> Services:
        """See `Credentials`."""
        files = {"tls-cert": "service.pem", "tls-key": "service-key.pem", "tls-client-ca": "ca.pem"}
        tls = [word for name, file in files.items() for word in (f"--{name}", str(self._certificates / file))]
        service = Services(processes, [*where, *tls, "--roles", str(self._folder / "roles.toml")], count)
        reached = {"address": service.grpc, "http": service.http, "ca": "certificates/ca.pem"}
        self._write(STATUS, reached | {"token_file": "status-token"})
        for name in self._names:
            pair = {"cert": f"certificates/{name}.pem", "key": f"certificates/{name}-key.pem"}
            self._write(name, reached | pair)
        return service

    def endpoint(self, name: str) -> Endpoint:
        """See `Credentials`."""
        return Endpoint.from_file(self._file(name))

    def arguments(self, name: str) -> list[str]:
        """See `Credentials`."""
        return ["--endpoint", str(self._file(name))]

    def _file(self, name: str) -> Path:
        return self._folder / f"endpoint-{name}.toml"

    def _write(self, name: str, settings: Mapping[str, str]) -> None:
        self._file(name).write_text("".join(f'{key} = "{value}"\n' for key, value in settings.items()))


def _grants(model: str, fleets: Sequence[Fleet]) -> dict[str, Grant]:
    """What those may do who have certificates, by their names."""
    replicas = {name: Grant(Role.SUBSCRIBE, fleet.consumer) for fleet in fleets for name in fleet.replicas}
    return {ADMIN: Grant(Role.ADMIN), TRAINER: Grant(Role.PUBLISH, model), **replicas}


def _roles(grants: Mapping[str, Grant], status_token: str) -> str:
    """The roles file."""
    digest = token_digest(status_token).hex()
    token = f'[tokens.{STATUS}]\nsha256 = "{digest}"\nroles = ["{Role.READ.value}"]\n'
    certificates = (f'[certificates."{name}"]\nroles = ["{grant}"]\n' for name, grant in grants.items())
    return "\n".join([token, *certificates])
