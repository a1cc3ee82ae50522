"""The files that a client speaks TLS with."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from deltasync.core.errors import InvalidInput


@dataclass(frozen=True)
class TlsFiles:
    """The files that a client speaks TLS with; they are read anew for each connection.

    Attributes:
        ca: PEM file of the CAs that a service's certificate may be from; None = those of this machine.
        cert: PEM file of the client's own certificate; None = it has none.
        key: PEM file of its key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """What a connection by HTTP is made with.

        Raises:
            InvalidInput: a file cannot be read, is no PEM, or the key is not that of the certificate.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise InvalidInput(_unfit(f"ca {self.ca}", error)) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert:
            try:
                # Without a passphrase OpenSSL would ask for it at the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ValueError) as error:
                raise InvalidInput(_unfit(f"cert {self.cert}, key {self.key}", error)) from error
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """What a connection by gRPC is made with.

        Raises:
            InvalidInput: likewise.
        """
        self.context()  # gRPC would say of files that do not fit each other that the service cannot be reached.
        return grpc.ssl_channel_credentials(*map(_content, (self.ca, self.key, self.cert)))


def _content(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise InvalidInput(_unfit(str(path), error)) from error


def _unfit(what: str, error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{what}: the key is not that of the certificate"
    if isinstance(error, ssl.SSLError):
        return f"{what}: not in PEM, or with a passphrase ({error})"
    return f"{what}: {getattr(error, 'strerror', None) or error}"
