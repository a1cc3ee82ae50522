"""The service's certificate, its key and the CAs of its clients, also after the files change."""

import asyncio
import ssl
import time
from asyncio import constants
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from deltasync.base.errors import InvalidInput
from deltasync.base.events import EventKind, Events
from deltasync.base.files import FileWatch, readable_by_all
from deltasync.base.words import utc


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

    async def follow(self, events: Events, expiries: dict[str, float]) -> None:
        """Read the files whenever they change, until cancelled; what is not sound is not taken over.

        Args:
            events: where it is said.
            expiries: set to when each certificate expires, seconds since 1970, by the name of its file.
        """
        self._tell(events, expiries)
        while True:
            await self._watch.changed()
            try:
                found = await asyncio.to_thread(Certificates.read, self._options)
            except InvalidInput as error:
                events.emit(EventKind.CERTIFICATE_REFUSED, "the one before stays in use", error)
                continue
            if found.contents != self.newest.contents:
                self.newest = found
                events.emit(EventKind.CERTIFICATE_RELOADED, _expiries(found))
            self._tell(events, expiries)

    def _tell(self, events: Events, expiries: dict[str, float]) -> None:
        expiries |= {name: ends for name, (_, ends) in self.newest.validity.items()}
        for text in self.newest.doubts(time.time()):
            events.emit(EventKind.CERTIFICATE_EXPIRED, text)
        if self.newest.exposure:
            events.emit(EventKind.KEY_EXPOSED, self.newest.exposure)

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


# Kinds of subject alternative names, as `ssl` calls them; an address says where a peer is, not who it is.
_KINDS = ("DNS", "URI", "email")


def names_of_certificate(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a certificate that a TLS handshake has verified.

    Args:
        certificate: as `ssl.SSLObject.getpeercert` returns it; None or empty without one.

    Returns:
        The DNS, URI and e-mail subject alternative names in the order of the certificate, then the common name;
        empty without a certificate.
    """
    if not certificate:
        return ()
    alternative = [name for kind, name in certificate.get("subjectAltName", ()) if kind in _KINDS]
    parts = [pair for part in certificate.get("subject", ()) for pair in part]
    return _unique([*alternative, *(name for kind, name in parts if kind == "commonName")])


def names_of_auth_context(context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The same of a gRPC call.

    Args:
        context: `grpc.aio.ServicerContext.auth_context()`; empty without TLS.
    """
    addresses = set(context.get("x509_ip", ()))
    keys = ("x509_subject_alternative_name", "x509_common_name")
    found = [name for key in keys for name in context.get(key, ()) if name not in addresses]
    return _unique([name.decode(errors="replace") for name in found])


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
