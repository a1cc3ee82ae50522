"""Certificates of CAs that are made for a test."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme

from deltasync.api.tls_options import TlsOptions
from deltasync.client import Endpoint


class Pki:
    """A folder with the CA of a service, that of its clients, and what they have signed.

    What is issued again is written over what there was, as whoever renews certificates does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.services, self.clients = trustme.CA(), trustme.CA()
        self.write_cas()
        self.issue_service()
        self.issue_client()

    @property
    def options(self) -> TlsOptions:
        return TlsOptions(
            cert=self.path("service"), key=self.path("service-key"), client_ca=self.path("clients-ca")
        )

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.pem"

    def write_cas(self) -> None:
        self.path("services-ca").write_bytes(self.services.cert_pem.bytes())
        self.path("clients-ca").write_bytes(self.clients.cert_pem.bytes())

    def issue_service(self, *names: str, expired: bool = False) -> None:
        past = datetime.now(UTC) - timedelta(days=2)
        times: dict[str, Any] = {"not_before": past, "not_after": past + timedelta(days=1)} if expired else {}
        self._write("service", self.services.issue_cert(*(names or ("localhost", "127.0.0.1")), **times))

    def issue_client(self, name: str = "trainer.example", ca: trustme.CA | None = None) -> None:
        self._write("client", (ca or self.clients).issue_cert(name, common_name="a trainer"))

    def endpoint(self, address: str, **settings: Any) -> Endpoint:
        """Of a client that shows its certificate."""
        shown = {"cert": self.path("client"), "key": self.path("client-key")}
        return Endpoint(address, **{"ca": self.path("services-ca"), **shown, **settings})

    def _write(self, name: str, issued: trustme.LeafCert) -> None:
        """The key first: a pair that does not fit is not taken over, and the next look finds both."""
        for path, content in (
            (self.path(f"{name}-key"), issued.private_key_pem.bytes()),
            (self.path(name), b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ):
            path.touch(0o600)
            path.write_bytes(content)
