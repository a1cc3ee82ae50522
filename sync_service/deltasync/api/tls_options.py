"""The files that the service speaks TLS with."""

from dataclasses import dataclass
from pathlib import Path

from deltasync.core.errors import InvalidInput
from deltasync.core.exposure import readable_by_all


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The files that the service speaks TLS with, on both ports. They are read again when they change.

    Attributes:
        cert: PEM file of the service's certificate, followed by those between it and its CA.
        key: PEM file of its key, without a passphrase.
        client_ca: PEM file of the CAs of clients. gRPC then needs a certificate of theirs; HTTP asks for one, and
            does without it. None = no client is asked for one.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of_settings(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> "TlsOptions | None":
        """The options that settings describe; None where they name no file: then there is no TLS.

        Raises:
            InvalidInput: a certificate without its key, a key without its certificate, or only CAs of clients.
        """
        if cert and key:
            return cls(cert=cert, key=key, client_ca=client_ca)
        if cert or key or client_ca:
            missing = [name for name, path in (("--tls-cert", cert), ("--tls-key", key)) if not path]
            raise InvalidInput(f"TLS needs a certificate and its key: give {' and '.join(missing)} too")
        return None

    @property
    def files(self) -> list[Path]:
        """All of them."""
        return [path for path in (self.cert, self.key, self.client_ca) if path]

    @property
    def exposure(self) -> str:
        """How the key is open to others on this machine, in words; empty if it is not.

        Raises:
            InvalidInput: it is not there: just now it was.
        """
        if readable_by_all(self.key):
            return f"{self.key} can be read by every user of this machine: chmod o-rwx {self.key}"
        return ""
