"""The service's certificate, its key and the CAs of its clients, in the state of their files."""

import asyncio
import ssl
import time
from asyncio import constants
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from deltasync.api.tls_options import TlsOptions
from deltasync.core.errors import InvalidInput
from deltasync.core.events import EventKind
from deltasync.core.file_watch import FileWatch
from deltasync.core.words import utc
from deltasync.service.service import Service

# Between two looks whether they have changed.
LOOK_SECONDS = 1.0
# Who connects and then does not get to the end of the handshake is hung up on after so long.
HANDSHAKE_SECONDS = 10.0
# A file that is written in the middle of being read is read again, so often.
_TRIES = 3


@dataclass(frozen=True)
class Certificates:
    """What was found in the files, at one moment.

    Attributes:
        contents: of each file.
        http: for HTTP.
        grpc: for gRPC.
        validity: from when to when the certificates of a file are all valid, seconds since 1970, by the name of
            the option with the file.
        exposure: how the key is open to others, in words; empty if it is not.
    """

    contents: Mapping[Path, bytes]
    http: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration
    validity: Mapping[str, tuple[float, float]]
    exposure: str

    @classmethod
    def read(cls, options: TlsOptions) -> "Certificates":
        """Read the files. Blocks.

        Raises:
            InvalidInput: one cannot be read, is no PEM, or the key is not that of the certificate.
        """
        for _ in range(_TRIES):
            contents = _contents(options)
            try:
                found = cls._of(options, contents)
            except InvalidInput:  # Also for one file as it was before a change, and another as it was after it.
                if _contents(options) == contents:
                    raise
            else:
                if _contents(options) == contents:
                    return found
        raise InvalidInput(f"{', '.join(map(str, options.files))}: they change all the time")

    @classmethod
    def _of(cls, options: TlsOptions, contents: Mapping[Path, bytes]) -> "Certificates":
        clients = contents[options.client_ca] if options.client_ca else None
        validity = {"tls_cert": _validity(options.cert, contents[options.cert])}
        if options.client_ca and clients is not None:
            validity["tls_client_ca"] = _validity(options.client_ca, clients)
        pair = contents[options.key], contents[options.cert]
        return cls(
            contents,
            _http_context(options, clients),
            grpc.ssl_server_certificate_configuration([pair], clients),
            validity,
            options.exposure,
        )

    def doubts(self, now: float) -> list[str]:
        """What keeps peers from accepting some of them, in words.

        Args:
            now: seconds since 1970.
        """
        found = []
        for name, (begins, ends) in self.validity.items():
            if not begins <= now <= ends:
                word, limit = ("has expired", ends) if now > ends else ("is not valid yet", begins)
                found.append(f"a certificate of {name} {word} ({utc(int(limit) * 10**9)}): peers refuse it")
        return found


class CertificateFiles:
    """The files, and what was last found in them that is sound. Used in the event loop, but for what TLS asks for.

    Attributes:
        newest: what was last found.
    """

    def __init__(self, options: TlsOptions) -> None:
        """Read the files.

        Raises:
            InvalidInput: see `Certificates.read`.
        """
        self._options = options
        self._watch = FileWatch(options.files, LOOK_SECONDS)
        self.newest = Certificates.read(options)
        self._handed = self.newest

    def http_context(self) -> ssl.SSLContext:
        """What connections to HTTP are made with: each with the newest certificates."""
        # In the whole process: uvicorn has no setting for it.
        constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_SECONDS
        return _NewestContext(self)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """What connections to gRPC are made with, likewise."""
        mutual, first = self._options.client_ca is not None, self._handed.grpc
        return grpc.dynamic_ssl_server_credentials(first, self._changed, mutual)  # type: ignore[arg-type]

    async def follow(self, service: Service) -> None:
        """Read the files whenever they change, until cancelled; what is not sound is not taken over."""
        self._tell(service)
        while True:
            await self._watch.changed()
            try:
                found = await asyncio.to_thread(Certificates.read, self._options)
            except InvalidInput as error:
                service.events.emit(EventKind.CERTIFICATE_REFUSED, "the one before stays in use", error)
                continue
            if found.contents != self.newest.contents:
                self.newest = found
                service.events.emit(EventKind.CERTIFICATE_RELOADED, _expiries(found))
            self._tell(service)

    def _tell(self, service: Service) -> None:
        service.certificates_expire = {name: ends for name, (_, ends) in self.newest.validity.items()}
        for text in self.newest.doubts(time.time()):
            service.events.emit(EventKind.CERTIFICATE_EXPIRED, text)
        if self.newest.exposure:
            service.events.emit(EventKind.KEY_EXPOSED, self.newest.exposure)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC is to use from here on; None: what it has. Called by its threads, one connection at a time."""
        newest = self.newest
        if newest is self._handed:
            return None
        self._handed = newest
        return newest.grpc


class _NewestContext(ssl.SSLContext):
    """Has each connection made by the newest context that there is."""

    def __new__(cls, _files: CertificateFiles) -> "_NewestContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext`: what asyncio begins each connection with."""
        return self._files.newest.http.wrap_bio(*arguments, **named)


def _contents(options: TlsOptions) -> dict[Path, bytes]:
    try:
        return {path: path.read_bytes() for path in options.files}
    except OSError as error:
        raise InvalidInput(f"{error.filename}: {error.strerror}") from error


def _validity(path: Path, pem: bytes) -> tuple[float, float]:
    from cryptography import x509  # Not before: a service without TLS does without it.

    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidInput(f"{path}: no certificates in PEM ({error})") from error
    begins = max(each.not_valid_before_utc.timestamp() for each in found)
    return begins, min(each.not_valid_after_utc.timestamp() for each in found)


def _http_context(options: TlsOptions, clients: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a passphrase OpenSSL would ask for it at the terminal.
        context.load_cert_chain(options.cert, options.key, password="")
        if clients is not None:
            context.load_verify_locations(cadata=clients.decode("ascii"))
            context.verify_mode = ssl.CERT_OPTIONAL
    except (OSError, ValueError) as error:
        raise InvalidInput(_unfit(options, error)) from error
    return context


def _unfit(options: TlsOptions, error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{options.key} is not the key of the certificate in {options.cert}"
    if isinstance(error, ssl.SSLError):
        return f"{options.key}, {options.cert}: no key in PEM without a passphrase, or no certificate ({error})"
    return f"{error}"


def _expiries(found: Certificates) -> str:
    return "; ".join(f"{name} until {utc(int(ends) * 10**9)}" for name, (_, ends) in found.validity.items())
