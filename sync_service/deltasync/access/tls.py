"""The service's certificate, key and client CAs, reloaded when the files change."""

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
    """The TLS files of both ports. The service reloads them when they change.

    Attributes:
        cert: PEM file of the service's certificate, followed by any intermediate ones.
        key: PEM file of its key, without a passphrase.
        client_ca: PEM file of the CAs of clients. gRPC then requires a client certificate, and HTTP accepts one.
            None = no client certificates.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> list[Path]:
        """All files."""
        return [path for path in (self.cert, self.key, self.client_ca) if path]


# The service closes a connection whose handshake takes longer.
HANDSHAKE_SECONDS = 10.0
# Attempts to read files that change during the read.
_TRIES = 3


@dataclass(frozen=True)
class Certificates:
    """The certificates at one moment, and what gRPC and HTTP need of them.

    `validity` has the first and last second since 1970 at which all certificates of a file are valid, by option.
    `exposure` warns if all users of this machine can read the key.
    """

    contents: Mapping[Path, bytes]
    http: ssl.SSLContext
    grpc: grpc.ServerCertificateConfiguration
    validity: Mapping[str, tuple[float, float]]
    exposure: str

    @classmethod
    def read(cls, options: TlsOptions) -> "Certificates":
        """Read the files. Blocks."""
        for _ in range(_TRIES):
            contents = _contents(options)
            try:
                certificates = cls._of(options, contents)
            except InvalidInput:  # Perhaps one file is from before a change, and another from after.
                if _contents(options) == contents:
                    raise
            else:
                if _contents(options) == contents:
                    return certificates
        raise InvalidInput(
            f"{', '.join(map(str, options.files))}: the files keep changing; replace them less often"
        )

    @classmethod
    def _of(cls, options: TlsOptions, contents: Mapping[Path, bytes]) -> "Certificates":
        clients = contents[options.client_ca] if options.client_ca else None
        validity = {"tls_cert": _validity(options.cert, contents[options.cert])}
        if options.client_ca and clients is not None:
            validity["tls_client_ca"] = _validity(options.client_ca, clients)
        pair = contents[options.key], contents[options.cert]
        exposed = f"{options.key} can be read by every user of this machine: chmod o-rwx {options.key}"
        return cls(
            contents,
            _http_context(options, clients),
            grpc.ssl_server_certificate_configuration([pair], clients),
            validity,
            exposed if readable_by_all(options.key) else "",
        )

    def doubts(self, now: float) -> list[str]:
        """The reasons why peers refuse a certificate, in words; `now` is in seconds since 1970."""
        doubts = []
        for name, (begins, ends) in self.validity.items():
            if not begins <= now <= ends:
                word, limit = ("has expired", ends) if now > ends else ("is not valid yet", begins)
                doubts.append(f"a certificate of {name} {word} ({utc(int(limit) * 10**9)}): peers refuse it")
        return doubts


class CertificateFiles:
    """The `newest` valid certificates in the files. For the event loop, except the callbacks of TLS."""

    def __init__(self, options: TlsOptions, look_seconds: float) -> None:
        """Read the files, and look for changes this often."""
        self._options = options
        self._watch = FileWatch(options.files, look_seconds)
        self.newest = Certificates.read(options)
        self._handed = self.newest

    def http_context(self, *_: object) -> ssl.SSLContext:
        """Make the TLS context for HTTP, which uses the newest certificates. uvicorn passes two arguments."""
        # uvicorn has no setting for this, so it applies to the whole process.
        constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_SECONDS
        return _NewestContext(self)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Make the credentials for gRPC, which use the newest certificates."""
        mutual, first = self._options.client_ca is not None, self._handed.grpc
        return grpc.dynamic_ssl_server_credentials(first, self._changed, mutual)  # type: ignore[arg-type]

    async def follow(self, events: Events, expiries: dict[str, float]) -> None:
        """Reload the files whenever they change, until cancelled. Invalid files change nothing.

        `expiries` gets the expiry of each file, in seconds since 1970, by the option that names it.
        """
        self._report(events, expiries)
        while True:
            await self._watch.changed()
            try:
                certificates = await asyncio.to_thread(Certificates.read, self._options)
            except InvalidInput as error:
                events.emit(EventKind.CERTIFICATE_REFUSED, "the previous one stays in use", error)
                continue
            if certificates.contents != self.newest.contents:
                self.newest = certificates
                events.emit(EventKind.CERTIFICATE_RELOADED, _expiries(certificates))
            self._report(events, expiries)

    def _report(self, events: Events, expiries: dict[str, float]) -> None:
        expiries |= {name: ends for name, (_, ends) in self.newest.validity.items()}
        for text in self.newest.doubts(time.time()):
            events.emit(EventKind.CERTIFICATE_EXPIRED, text)
        if self.newest.exposure:
            events.emit(EventKind.KEY_EXPOSED, self.newest.exposure)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration for gRPC, or None to keep the current one. gRPC calls it for each connection."""
        newest = self.newest
        if newest is self._handed:
            return None
        self._handed = newest
        return newest.grpc


class _NewestContext(ssl.SSLContext):
    """A context that opens each connection with the newest certificates."""

    def __new__(cls, _files: CertificateFiles) -> "_NewestContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        """See `ssl.SSLContext`; asyncio calls it for each connection."""
        return self._files.newest.http.wrap_bio(*arguments, **named)


def _contents(options: TlsOptions) -> dict[Path, bytes]:
    try:
        return {path: path.read_bytes() for path in options.files}
    except OSError as error:
        raise InvalidInput(f"{error.filename}: {error.strerror}") from error


def _validity(path: Path, pem: bytes) -> tuple[float, float]:
    from cryptography import x509  # Imported late, as a service without TLS does not need it.

    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidInput(f"{path}: expected certificates in PEM ({error})") from error
    begins = max(each.not_valid_before_utc.timestamp() for each in certificates)
    return begins, min(each.not_valid_after_utc.timestamp() for each in certificates)


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
        return f"{options.key}, {options.cert}: expected a PEM key without passphrase and a certificate ({error})"
    return f"{error}"


def _expiries(certificates: Certificates) -> str:
    return "; ".join(f"{name} until {utc(int(ends) * 10**9)}" for name, (_, ends) in certificates.validity.items())


# Kinds of subject alternative names that identify a peer, as `ssl` spells them. An address does not.
_KINDS = ("DNS", "URI", "email")


def names_of_certificate(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a certificate, as `ssl.SSLObject.getpeercert` returns it: the common name comes last."""
    if not certificate:
        return ()
    alternative = [name for kind, name in certificate.get("subjectAltName", ()) if kind in _KINDS]
    parts = [pair for part in certificate.get("subject", ()) for pair in part]
    return _unique([*alternative, *(name for kind, name in parts if kind == "commonName")])


def names_of_auth_context(context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The names in the verified certificate of a gRPC call, from its `auth_context()`."""
    addresses = set(context.get("x509_ip", ()))
    keys = ("x509_subject_alternative_name", "x509_common_name")
    names = [name for key in keys for name in context.get(key, ()) if name not in addresses]
    return _unique([name.decode(errors="replace") for name in names])


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
