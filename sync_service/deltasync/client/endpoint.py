"""The address of a service and the client's credentials. Opens all connections, to the process that is asked."""

import os
import random
import ssl
import threading
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from deltasync.access.roles import checked_token
from deltasync.base.addresses import host_and_port, is_loopback, is_url, with_port
from deltasync.base.arguments import check_type
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, Owner, ServiceUnavailable
from deltasync.client.connection import note_connecting
from deltasync.wire.errors import from_rpc_error, of_connection, protocol_to_metadata

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    # Do not use a proxy that the environment sets for other purposes.
    ("grpc.enable_http_proxy", 0),
    # A new channel opens a new connection. Otherwise it would share a dead one with the process's other channels.
    ("grpc.use_local_subchannel_pool", 1),
    # The client retries by itself (see `backoff`). gRPC's own pauses of up to two minutes would come on top.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, this is the timeout of an attempt. A shorter one fails in a slow network.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True)
class Endpoint:
    """The address of a service, and the client's credentials.

    Wherever an endpoint is expected, a string also works: an address without credentials, in plain text. Every
    connection reads the files again, so you can renew certificates and tokens in place.

    Attributes:
        address: the gRPC address, HOST:PORT. If you only use HTTP: http://HOST:PORT or https://HOST:PORT. For a
            service of several processes, the addresses of some of them, separated by commas. Any process names the
            owner of a model.
        token: identifies the caller. A service with roles refuses most calls without a token or a certificate.
        timeout_seconds: timeout of a call, and of the first message on a stream.
        by: the caller's name in the service's log of changes.
        ca: PEM file of the CA of the service's certificate. gRPC uses TLS if it is set. HTTP uses TLS if the
            address is https://, by default with the CAs of this machine.
        cert: PEM file of the client's own certificate.
        key: PEM file of its key.
        server_name: the name in the service's certificate if it is not the host of the address.
        token_file: a file with the token.
        http: the HTTP address of the same service, for operators.
        insecure: allow a token to be sent to another machine in plain text. Anybody on the way can read it.

    Raises:
        InvalidInput: a value cannot be sent, the timeout is not above 0, or options contradict each other.
            Connecting raises it too if a file cannot be used, or a token would be sent in plain text.
    """

    address: str
    token: str = field(default="", repr=False)
    timeout_seconds: float = 10.0
    by: str = ""
    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str = ""
    token_file: Path | str | None = None
    http: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        for name in ("address", "token", "http"):
            check_type("Endpoint(address, token)", name, getattr(self, name), str)
        for name in ("address", "http"):
            scheme, separator, rest = getattr(self, name).strip().rpartition("://")
            object.__setattr__(self, name, f"{scheme.lower()}{separator}{rest}")
        if self.token:
            object.__setattr__(self, "token", checked_token("token", self.token))
        if not (self.by.isascii() and self.by.isprintable()):
            raise InvalidInput("by: expected only printable ASCII characters")
        if not 0 < self.timeout_seconds <= threading.TIMEOUT_MAX:
            text = f"timeout_seconds: {self.timeout_seconds}, expected more than 0, and a finite number"
            raise InvalidInput(text)
        if self.token and self.token_file:
            raise InvalidInput(f"token and token_file {self.token_file}: set only one of them")
        if bool(self.cert) != bool(self.key):
            raise InvalidInput("cert and key belong together: set both, or neither")

    def __str__(self) -> str:
        return self.address

    @classmethod
    def from_environment(cls, address: str = "", **given: Any) -> "Endpoint":
        """Read an endpoint from arguments, environment variables and a file, in this order of precedence.

        The variables are DELTASYNC_SERVICE (the address), _HTTP, _CA, _CERT, _KEY, _SERVER_NAME, _TOKEN,
        _TOKEN_FILE and _ADMIN_TOKEN. The argument `endpoint` or DELTASYNC_ENDPOINT names a file for `from_file`.

        Raises:
            InvalidInput: there is no address, the file cannot be read, or a value is invalid (see `Endpoint`).
        """
        settings = endpoint_settings({"address": address, **given}, os.environ)
        variables = "DELTASYNC_SERVICE, DELTASYNC_HTTP or DELTASYNC_ENDPOINT"
        return cls._of_settings(settings, f"no address of the service: pass it, or set {variables}")

    @classmethod
    def from_file(cls, path: Path | str) -> "Endpoint":
        """Read an endpoint from a TOML file.

        Its keys are address, http, ca, cert, key, server_name and token_file. Paths are relative to its folder.

        Raises:
            InvalidInput: the file cannot be read, has other keys, no address or an invalid value.
        """
        return cls._of_settings(
            file_settings(Path(path)), f"endpoint {path}: no address; set the key address or http"
        )

    @classmethod
    def _of_settings(cls, settings: Mapping[str, Any], missing: str) -> "Endpoint":
        if not (address := settings.get("address") or settings.get("http")):
            raise InvalidInput(missing)
        return cls(**{**settings, "address": address})

    @classmethod
    def of_grpc(cls, service: "Endpoint | str") -> "Endpoint":
        """Check the gRPC endpoint of a service and return it."""
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        addresses = list[str]()
        for each in endpoint.alone():
            if is_url(each.address):
                raise InvalidInput(f"service {each.address!r}: expected HOST:PORT of gRPC, by default port 50051")
            try:
                addresses.append(with_port(*host_and_port(each.address)))
            except InvalidInput as error:
                raise InvalidInput(f"service {error}") from error
            each._check_use()
        same = endpoint.address == ",".join(addresses)
        return endpoint if same else replace(endpoint, address=",".join(addresses))

    @classmethod
    def of_http(cls, service: "Endpoint | str") -> "Endpoint":
        """Check the HTTP endpoint of a service and return it: at `http` if set, else at `address`."""
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        if endpoint.http:
            endpoint = replace(endpoint, address=endpoint.http, http="")
        for each in endpoint.alone():
            if not is_url(each.address):
                text = f"service {each.address!r}: expected http://HOST:PORT, by default port 8080"
                raise InvalidInput(f"{text}: set it with --service, http or DELTASYNC_HTTP")
            each._check_use()
        return endpoint

    def alone(self) -> "list[Endpoint]":
        """An endpoint for each of the addresses."""
        addresses = [each.strip() for each in self.address.split(",")]
        return [replace(self, address=each, http="") for each in addresses] if len(addresses) > 1 else [self]

    def at(self, owner: Owner) -> "Endpoint":
        """The endpoint of another process of the same service, with the same protocol and credentials.

        InvalidInput if the address is not valid or has another scheme, or a secret would be sent in plain text.
        """
        address = owner.http if is_url(self.address) else owner.grpc
        if is_url(self.address) and address.partition(":")[0] != self.address.partition(":")[0]:
            raise InvalidInput(f"service {address!r}: {self.address} names it as owner, but with another scheme")
        other = replace(self, address=address, http="")
        return Endpoint.of_http(other) if is_url(self.address) else Endpoint.of_grpc(other)

    @property
    def tls(self) -> bool:
        """Whether connections use TLS."""
        if is_url(self.address):
            return self.address.startswith("https://")
        return self.ca is not None

    def channel(self) -> grpc.Channel:
        """Open a gRPC channel whose calls carry the credentials and the protocol version.

        ServiceUnavailable if a file is unusable now, or this process was forked from a connected one.
        """
        self._check_secrecy()
        note_connecting()
        with _renewing():
            metadata = (protocol_to_metadata(), *self._rights().items())
            if self.tls:
                named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
                options = [*_CHANNEL_OPTIONS, *named]
                self._tls_context()  # For files that do not belong together, gRPC would only report no connection.
                files = (_content(path) for path in (self.ca, self.key, self.cert))
                channel = grpc.secure_channel(self.address, grpc.ssl_channel_credentials(*files), options)
            else:
                channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        return grpc.intercept_channel(channel, _Calls(metadata, self.timeout_seconds))

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """Send an HTTP request; return the JSON answer, or None if it is empty. Needs httpx.

        The answer may take `patience_seconds`, by default `timeout_seconds`. Raises the service's own error, for
        example NotOwner if another process owns the model, or ServiceUnavailable.
        """
        from deltasync.client.http import NoAnswer, json_answer  # Predictors need no HTTP library.

        self._check_secrecy()
        with _renewing():
            context = self._tls_context() if self.tls else None
            rights = self._rights()
        url = self.address.rstrip("/") + path
        patience = self.timeout_seconds if patience_seconds is None else patience_seconds
        try:
            timeouts = self.timeout_seconds, patience
            return json_answer(method, url, body, rights, timeouts, context, self.server_name)
        except NoAnswer as error:
            means = meaning(str(error), tls=self.tls, certificate=self.cert is not None)
            asked = "is the service running, and is this its HTTP address?"
            raise ServiceUnavailable(f"{url}: {error}: {means or asked}") from error

    def error_of(self, failure: grpc.RpcError) -> DeltasyncError:
        """The error of a failed call, see `from_rpc_error`. Without a connection it includes the likely cause."""
        error = from_rpc_error(failure, self.address)
        if isinstance(error, ServiceUnavailable) and of_connection(failure):
            means = meaning(str(error), tls=self.tls, certificate=self.cert is not None)
            return ServiceUnavailable(f"{error}: {means}") if means else error
        return error

    def _rights(self) -> dict[str, str]:
        """The credentials as gRPC metadata or HTTP headers."""
        token = self._read_token() if self.token_file else self.token
        rights = {"authorization": f"Bearer {token}"} if token else {}
        return rights | ({"deltasync-by": self.by} if self.by else {})

    def _read_token(self) -> str:
        try:
            token = Path(self.token_file or "").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "not text")
            raise InvalidInput(f"token_file {self.token_file}: {why}") from error
        return checked_token(f"token_file {self.token_file}", token)

    def _check_secrecy(self) -> None:
        """Check that no secret would be sent in plain text."""
        if self.tls:
            return
        if named := [name for name in ("ca", "cert", "server_name") if getattr(self, name)]:
            how = "use https://" if is_url(self.address) else "set ca to the file of the service's CA"
            raise InvalidInput(f"service {self.address!r}: {named[0]} needs TLS: {how}, or leave {named[0]} out")
        http = is_url(self.address)
        host = urllib.parse.urlsplit(self.address).hostname or "" if http else self.address.rpartition(":")[0]
        if (self.token or self.token_file) and not self.insecure and not is_loopback(host.strip("[]")):
            raise InvalidInput(
                f"service {self.address!r}: a token is not sent to another machine in plain text: set ca, use "
                "https://, or allow it with insecure"
            )

    def _check_use(self) -> None:
        """Check that files can be read, and that no secret would be sent in plain text."""
        self._check_secrecy()
        if self.tls:
            self._tls_context()
        if self.token_file:
            self._read_token()

    def _tls_context(self) -> ssl.SSLContext:
        """The TLS settings of an HTTP connection; InvalidInput if the files are unusable."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise InvalidInput(_unfit(f"ca {self.ca}", error)) from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert:
            try:
                # Without a passphrase OpenSSL would prompt for it in the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ValueError) as error:
                raise InvalidInput(_unfit(f"cert {self.cert}, key {self.key}", error)) from error
        return context


@contextmanager
def _renewing() -> Iterator[None]:
    """Turn file errors into a temporary error. The files were valid before, and are perhaps being renewed."""
    try:
        yield
    except InvalidInput as error:
        raise ServiceUnavailable(f"{error}; the client tries again") from error


@dataclass(frozen=True)
class _Calls(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds metadata to every call, and a timeout to every unary call. gRPC knows the other details of a call."""

    metadata: tuple[tuple[str, str], ...]
    timeout_seconds: float

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], _call: Any, request: Any) -> Any:
        """Start a unary call."""
        return continuation(SimpleNamespace(metadata=self.metadata, timeout=self.timeout_seconds), request)

    def intercept_stream_stream(self, continuation: Callable[[Any, Any], Any], _call: Any, requests: Any) -> Any:
        """Open a stream."""
        return continuation(SimpleNamespace(metadata=self.metadata, timeout=None), requests)


_PATHS = ("ca", "cert", "key", "token_file")
# Keys of an endpoint file, with the names of the arguments.
_KEYS = ("address", "http", "server_name", *_PATHS)
# The variable of each argument in the environment.
_VARIABLES = {
    "address": "DELTASYNC_SERVICE",
    **{name: f"DELTASYNC_{name.upper()}" for name in ("http", "server_name", "ca", "cert", "key")},
}
# The first variable that is set counts.
_TOKENS = (
    ("token", "DELTASYNC_TOKEN"),
    ("token_file", "DELTASYNC_TOKEN_FILE"),
    ("token", "DELTASYNC_ADMIN_TOKEN"),
)


def endpoint_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Merge an `Endpoint`'s arguments from the caller, the environment and a file, in this order of precedence.

    `given["endpoint"]` is the path of the file, by default from DELTASYNC_ENDPOINT.
    """
    arguments = {name: value for name, value in given.items() if value not in (None, "")}
    file = arguments.pop("endpoint", None) or environment.get("DELTASYNC_ENDPOINT")
    merged: dict[str, Any] = {}
    variables = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    tokens = [(name, environment[variable]) for name, variable in _TOKENS if environment.get(variable)]
    variables |= dict(tokens[:1])
    for source in (file_settings(Path(file)) if file else {}, variables, arguments):
        if source.keys() & {"token", "token_file"}:  # Either one replaces both.
            merged.pop("token", None)
            merged.pop("token_file", None)
        merged |= source
    return merged


def file_settings(path: Path) -> dict[str, Any]:
    """Read the settings in a TOML file. Paths are relative to its folder."""
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"endpoint {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"endpoint {path}: {error}") from error
    if unknown := sorted(settings.keys() - set(_KEYS)):
        raise InvalidInput(f"endpoint {path}: unknown key {unknown[0]!r}; keys: {', '.join(_KEYS)}")
    if wrong := [name for name, value in settings.items() if not isinstance(value, str)]:
        raise InvalidInput(f"endpoint {path}: {wrong[0]}: expected a string")
    return {name: path.parent / value if name in _PATHS else value for name, value in settings.items()}


def _content(path: Path | str | None) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise InvalidInput(_unfit(str(path), error)) from error


def _unfit(what: str, error: Exception) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{what}: the key does not belong to the certificate"
    if isinstance(error, ssl.SSLError):
        return f"{what}: expected PEM without a passphrase ({error})"
    return f"{what}: {getattr(error, 'strerror', None) or error}"


# Bounds the redirects if processes refer to each other.
_MOST_TURNS = 4
# The longest pause while a model has no owner. It gets one when the last owner's lease ends.
_LONGEST_SECONDS = 1.0


class Route:
    """Chooses the process to ask: one of the endpoint's addresses, or the owner that one of them has named.

    The owner gets the endpoint's credentials, over the same scheme. With TLS its certificate must be from the same
    CA. Without TLS, an owner on another machine gets no token unless the endpoint allows it; the route then asks
    the endpoint's next address.

    Attributes:
        endpoint: the process to ask now.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._all = endpoint.alone()
        random.shuffle(self._all)  # Spreads the load of many clients.
        self._next, self._turns = 0, 0
        # Whether a process has named another owner: since the last pause, and in the round before it.
        self._moving = self._moves = False
        self.endpoint = self._all[0]

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """Send an HTTP request to the process that owns the model; see `Endpoint.ask`."""
        while True:
            try:
                return self.endpoint.ask(method, path, body, patience_seconds)
            except DeltasyncError as error:
                if not self.turn(error):
                    raise

    def answered(self) -> None:
        """Stay with the process, because it has answered."""
        self._turns = 0

    def turn(self, error: DeltasyncError) -> bool:
        """Choose another process after an error if that can help; return whether to ask it without a pause."""
        self._turns += 1
        self._moving |= isinstance(error, NotOwner)
        if isinstance(error, NotOwner) and error.owner:
            with suppress(InvalidInput):  # This client cannot use the owner's address.
                self.endpoint = self._all[0].at(error.owner)
                return self._turns <= _MOST_TURNS or self._pause()
        if not isinstance(error, ServiceUnavailable):
            return False
        self._next = (self._next + 1) % len(self._all)
        self.endpoint = self._all[self._next]
        unasked = not isinstance(error, NotOwner) and self._turns < len(self._all)
        return unasked or self._pause()

    def pause(self, seconds: float) -> float:
        """The length of a pause: `seconds`, or less while the model moves to another owner."""
        return min(seconds, random.uniform(0.1, 1.0) * _LONGEST_SECONDS) if self._moves else seconds  # noqa: S311

    def _pause(self) -> bool:
        self._turns, self._moves, self._moving = 0, self._moving, False
        return False


_OTHER_NAME = "its certificate is for another name: set server_name to the name in it"
_OTHER_HOST = "is its host name right, and can this machine resolve it?"
# Errors of gRPC and OpenSSL, and their causes. The first match counts.
_MEANINGS = {
    "Hostname Verification Check failed": _OTHER_NAME,
    "Hostname mismatch": _OTHER_NAME,
    "IP address mismatch": _OTHER_NAME,
    "certificate has expired": "its certificate, or its CA's, has expired, or this machine's clock is wrong",
    "certificate is not yet valid": "its certificate, or its CA's, is not yet valid, or this machine's clock is "
    "wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from a CA that this client trusts: set ca to the file of "
    "the service's CA",
    "Connection refused": "nothing listens there: is the service running, and is this its address?",
    "lookup failed": _OTHER_HOST,
    "service not known": _OTHER_HOST,
    "No address associated": _OTHER_HOST,
    "name resolution": _OTHER_HOST,
    "no HTTP answer": "perhaps this is a gRPC port: use the service's HTTP address, by default port 8080",
    "http1.x server": "this is an HTTP port: use the service's gRPC address, by default port 50051",
    "WRONG_VERSION_NUMBER": "this port does not use TLS: use http:// and no CA, or the port with TLS",
}
# The peer aborted the handshake. gRPC does not report why.
_BROKEN_OFF = ("Socket closed", "Connection reset", "Broken pipe")


def meaning(details: str, *, tls: bool, certificate: bool) -> str:
    """The likely cause of a failed connection, in words; empty if there is no single likely one.

    `details` is the error of gRPC, httpx or OpenSSL; `certificate` says whether the client sent one.
    """
    if sign := next((sign for sign in _MEANINGS if sign in details), None):
        return _MEANINGS[sign]
    hint = "it may need a client certificate: set cert and key"
    if certificate:
        hint = "it may refuse this client's certificate: is it still valid, and from a CA that the service trusts?"
    if tls and "_ALERT_" in details:  # A TLS alert from the peer.
        return hint
    refusal = hint if tls else "this port may need TLS: set ca, and use https:// for HTTP"
    broken_off = "failed to connect" in details and any(sign in details for sign in _BROKEN_OFF)
    # Over HTTP, a service that is killed leaves like a port of the other kind.
    if "Server disconnected without sending a response" in details:
        return f"the service ended before it answered, or {refusal}"
    return refusal if broken_off else ""
