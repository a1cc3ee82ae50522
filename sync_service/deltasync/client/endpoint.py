"""Where a service is reached and with which rights. All connections to a service are made here."""

import os
import random
import ssl
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from deltasync.access.roles import checked_token
from deltasync.base.addresses import host_and_port, is_loopback, is_url, with_port
from deltasync.base.arguments import check_type
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, Owner, ServiceUnavailable
from deltasync.client.connection import note_connecting
from deltasync.client.http import HttpRequest, json_answer, meaning
from deltasync.wire.errors import from_rpc_error, of_connection, protocol_to_metadata

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    # Services are reached without a proxy. One that is set for other purposes must not be used.
    ("grpc.enable_http_proxy", 0),
    # A peer that hangs is found within 15 s; without the third one only after 65 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Retries are ours (see `backoff`); gRPC's own pause of up to two minutes would only add to them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, how long an attempt may take. A shorter one fails in a network with delays.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True)
class Endpoint:
    """Where a service is reached, and with which rights.

    A string is enough wherever an endpoint is expected: it is an address without rights, in plain text. Files are
    read for each connection. A file that is renewed in place is used from the next connection on.

    Attributes:
        address: where trainers and replicas reach it, by gRPC: HOST:PORT. For operators alone it may be where it
            answers HTTP: http://HOST:PORT or https://HOST:PORT. Of a service of several processes, the addresses
            of some, separated by commas: each process names the owner of a model.
        token: shows who calls. A service with roles refuses most calls without a token or a certificate.
        timeout_seconds: how long a call may take. Streams live as long as they are needed.
        by: who asks, for the service's log of changes.
        ca: PEM file of the CA that the service's certificate is from. With it gRPC speaks TLS; HTTP does by its
            address, without a file with the CAs of this machine.
        cert: PEM file of the client's own certificate.
        key: PEM file of its key.
        server_name: the name that the service's certificate is for, where it is not the host of the address.
        token_file: a file with the token.
        http: where the same service answers HTTP, for operators.
        insecure: send a token over plain text to another machine, where anybody on the way can read it.

    Raises:
        InvalidInput: a token or a name that cannot be sent, no time, or files that do not go together. Connecting
            raises it too if a file cannot be used, or a token would be sent over plain text.
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
        if not self.timeout_seconds > 0:
            raise InvalidInput(f"timeout_seconds: {self.timeout_seconds}, expected more than 0")
        if self.token and self.token_file:
            raise InvalidInput(f"token and token_file {self.token_file}: give one of them")
        if bool(self.cert) != bool(self.key):
            raise InvalidInput("cert and key: give both, or none")

    def __str__(self) -> str:
        return self.address

    @classmethod
    def from_environment(cls, address: str = "", **given: Any) -> "Endpoint":
        """An endpoint from what is given, then from the environment, then from the file that `endpoint` or
        DELTASYNC_ENDPOINT names: see `from_file`.

        The variables are DELTASYNC_SERVICE (the address), _HTTP, _CA, _CERT, _KEY, _SERVER_NAME, _TOKEN,
        _TOKEN_FILE and _ADMIN_TOKEN.

        Raises:
            InvalidInput: there is no address, the file cannot be read, or see `Endpoint`.
        """
        settings = endpoint_settings({"address": address, **given}, os.environ)
        if not (settings.get("address") or settings.get("http")):
            raise InvalidInput(
                "no address of the service: give it, or set DELTASYNC_SERVICE, DELTASYNC_HTTP or "
                "DELTASYNC_ENDPOINT"
            )
        return cls(**settings | {"address": settings.get("address") or settings["http"]})

    @classmethod
    def from_file(cls, path: Path | str) -> "Endpoint":
        """The endpoint that a TOML file describes, by the keys address, http, ca, cert, key, server_name and
        token_file. Paths are relative to its folder.

        Raises:
            InvalidInput: it cannot be read, has other keys or no address, or see `Endpoint`.
        """
        settings = file_settings(Path(path))
        if not (settings.get("address") or settings.get("http")):
            raise InvalidInput(f"endpoint {path}: there is no address")
        return cls(**settings | {"address": settings.get("address") or settings["http"]})

    @classmethod
    def of_grpc(cls, service: "Endpoint | str") -> "Endpoint":
        """Where a service answers gRPC.

        Raises:
            InvalidInput: the address is not HOST:PORT, or a file cannot be used.
        """
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        addresses = list[str]()
        for each in endpoint.alone():
            if is_url(each.address):
                raise InvalidInput(f"service {each.address!r}: expected HOST:PORT, of gRPC: by default port 50051")
            try:
                addresses.append(with_port(*host_and_port(each.address)))
            except InvalidInput as error:
                raise InvalidInput(f"service {error}") from error
            each._check_use()
        same = endpoint.address == ",".join(addresses)
        return endpoint if same else replace(endpoint, address=",".join(addresses))

    @classmethod
    def of_http(cls, service: "Endpoint | str") -> "Endpoint":
        """Where a service answers HTTP: the address, or `http` beside one of gRPC.

        Raises:
            InvalidInput: that is not http://HOST:PORT or https://HOST:PORT, or a file cannot be used.
        """
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        if endpoint.http:
            endpoint = replace(endpoint, address=endpoint.http, http="")
        for each in endpoint.alone():
            if not is_url(each.address):
                text = f"service {each.address!r}: expected http://HOST:PORT, by default port 8080"
                raise InvalidInput(f"{text}: --service, http or DELTASYNC_HTTP says it")
            each._check_use()
        return endpoint

    def alone(self) -> "list[Endpoint]":
        """An endpoint for each of the addresses."""
        addresses = [each.strip() for each in self.address.split(",")]
        return [replace(self, address=each, http="") for each in addresses] if len(addresses) > 1 else [self]

    def at(self, owner: Owner) -> "Endpoint":
        """The endpoint of another process of the same service, with these rights: of gRPC, or of HTTP as this one.

        Raises:
            InvalidInput: that is no address, has another scheme than this one, or would get a secret over plain
                text.
        """
        address = owner.http if is_url(self.address) else owner.grpc
        if is_url(self.address) and address.partition(":")[0] != self.address.partition(":")[0]:
            raise InvalidInput(f"service {address!r}: {self.address} has named it, which has another scheme")
        other = replace(self, address=address, http="")
        return Endpoint.of_http(other) if is_url(self.address) else Endpoint.of_grpc(other)

    @property
    def tls(self) -> bool:
        """Whether TLS is spoken."""
        if is_url(self.address):
            return self.address.startswith("https://")
        return self.ca is not None

    def channel(self) -> grpc.Channel:
        """A gRPC channel whose calls carry these rights and the version of the protocol.

        Raises:
            ServiceUnavailable: a file cannot be used now, perhaps because it is being renewed, or this process was
                forked from one that was connected.
        """
        self._check_secrecy()
        note_connecting()
        with _renewing():
            metadata = (protocol_to_metadata(), *self._rights().items())
            if self.tls:
                named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
                options = [*_CHANNEL_OPTIONS, *named]
                channel = grpc.secure_channel(self.address, self._files.credentials(), options)
            else:
                channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        return grpc.intercept_channel(channel, _Calls(metadata, self.timeout_seconds))

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """The service's JSON answer to an HTTP request; None where it is empty.

        Args:
            method: GET, PUT, POST or DELETE.
            path: with the query.
            body: sent as JSON; None = no body.
            patience_seconds: how long the answer may take, where that is longer than `timeout_seconds`.

        Raises:
            NotOwner: another process of the service owns the model.
            DeltasyncError: the error that the service has answered.
            ServiceUnavailable: it does not answer in time, or not with JSON; or a file cannot be used now.
        """
        self._check_secrecy()
        with _renewing():
            context = self._files.context() if self.tls else None
            rights = self._rights()
        return json_answer(
            HttpRequest(
                self.address.rstrip("/") + path,
                rights,
                self.timeout_seconds,
                method,
                body,
                patience_seconds,
                context,
                self.server_name,
                self.cert is not None,
            )
        )

    def error_of(self, failure: grpc.RpcError) -> DeltasyncError:
        """The error of a failed call, see `from_rpc_error`; without a connection also its likely cause."""
        error = from_rpc_error(failure, self.address)
        if isinstance(error, ServiceUnavailable) and of_connection(failure):
            means = meaning(str(error), tls=self.tls, certificate=self.cert is not None)
            return ServiceUnavailable(f"{error}: {means}") if means else error
        return error

    def _rights(self) -> dict[str, str]:
        """The rights as a call sends them: metadata in gRPC, headers in HTTP."""
        token = self._read_token() if self.token_file else self.token
        rights = {"authorization": f"Bearer {token}"} if token else {}
        return rights | ({"deltasync-by": self.by} if self.by else {})

    def _read_token(self) -> str:
        try:
            token = Path(self.token_file or "").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"token_file {self.token_file}: {getattr(error, 'strerror', 'no text')}") from error
        return checked_token(f"token_file {self.token_file}", token)

    def _check_secrecy(self) -> None:
        """Check that no secret would be sent over plain text."""
        if self.tls:
            return
        if named := [name for name in ("ca", "cert", "server_name") if getattr(self, name)]:
            how = "say https://" if is_url(self.address) else "give ca, the file of the service's CA"
            raise InvalidInput(f"service {self.address!r}: {named[0]} is for TLS: {how}, or leave {named[0]} out")
        http = is_url(self.address)
        host = urllib.parse.urlsplit(self.address).hostname or "" if http else self.address.rpartition(":")[0]
        if (self.token or self.token_file) and not self.insecure and not is_loopback(host.strip("[]")):
            raise InvalidInput(
                f"service {self.address!r}: a token is not sent over plain text to another machine: give ca, or "
                "https://, or allow it with insecure"
            )

    def _check_use(self) -> None:
        """Check that files can be read, and that no secret would be sent over plain text."""
        self._check_secrecy()
        if self.tls:
            self._files.context()
        if self.token_file:
            self._read_token()

    @property
    def _files(self) -> "TlsFiles":
        return TlsFiles(*(Path(path) if path else None for path in (self.ca, self.cert, self.key)))


@contextmanager
def _renewing() -> Iterator[None]:
    """Turn an error of files into one that may pass: they were right before, and may be again."""
    try:
        yield
    except InvalidInput as error:
        raise ServiceUnavailable(f"{error}; it is tried again") from error


class _Calls(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds metadata to every call, and a timeout to each call that is no stream."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], timeout_seconds: float) -> None:
        self._metadata = metadata
        self._timeout_seconds = timeout_seconds

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], _call: Any, request: Any) -> Any:
        """Make a call."""
        return continuation(_Details(self._metadata, self._timeout_seconds), request)

    def intercept_stream_stream(self, continuation: Callable[[Any, Any], Any], _call: Any, requests: Any) -> Any:
        """Begin a stream."""
        return continuation(_Details(self._metadata, None), requests)


class _Details(grpc.ClientCallDetails):
    """Metadata and timeout of a call; gRPC takes the rest from the call itself."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], timeout: float | None) -> None:
        self.metadata = metadata
        self.timeout = timeout


_PATHS = ("ca", "cert", "key", "token_file")
# Keys of the file; they are arguments too.
_KEYS = ("address", "http", "server_name", *_PATHS)
# The variable of each argument in the environment.
_VARIABLES = {
    "address": "DELTASYNC_SERVICE",
    **{name: f"DELTASYNC_{name.upper()}" for name in ("http", "server_name", "ca", "cert", "key")},
}
# The first one that is set counts.
_TOKENS = (
    ("token", "DELTASYNC_TOKEN"),
    ("token_file", "DELTASYNC_TOKEN_FILE"),
    ("token", "DELTASYNC_ADMIN_TOKEN"),
)
_FILE = "DELTASYNC_ENDPOINT"


def endpoint_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of an `Endpoint`: those of the caller, then of the environment, then of a file.

    Args:
        given: arguments of the caller; None and empty values do not count. `endpoint` is the path of the file, by
            default that of DELTASYNC_ENDPOINT.
        environment: variables of the process.

    Raises:
        InvalidInput: the file cannot be read, or has other keys.
    """
    arguments = {name: value for name, value in given.items() if value not in (None, "")}
    file = arguments.pop("endpoint", None) or environment.get(_FILE)
    merged: dict[str, Any] = {}
    for source in (file_settings(Path(file)) if file else {}, _variables(environment), arguments):
        if source.keys() & {"token", "token_file"}:  # One replaces the other.
            merged.pop("token", None)
            merged.pop("token_file", None)
        merged |= source
    return merged


def file_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; paths are relative to its folder.

    Raises:
        InvalidInput: it cannot be read, or has other keys or values.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"endpoint {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"endpoint {path}: {error}") from error
    if unknown := sorted(settings.keys() - set(_KEYS)):
        raise InvalidInput(f"endpoint {path}: unknown key {unknown[0]!r}; keys: {', '.join(_KEYS)}")
    if wrong := [name for name, value in settings.items() if not isinstance(value, str)]:
        raise InvalidInput(f"endpoint {path}: {wrong[0]}: expected a text")
    return {name: path.parent / value if name in _PATHS else value for name, value in settings.items()}


def _variables(environment: Mapping[str, str]) -> dict[str, Any]:
    settings = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    tokens = [(name, environment[variable]) for name, variable in _TOKENS if environment.get(variable)]
    return settings | dict(tokens[:1])


@dataclass(frozen=True)
class TlsFiles:
    """The files of a client's TLS, read for each connection.

    Attributes:
        ca: PEM file of the CAs to trust; None = those of this machine.
        cert: PEM file of the client's own certificate; None = it has none.
        key: PEM file of its key.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """The settings of a connection by HTTP.

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
        """The settings of a connection by gRPC.

        Raises:
            InvalidInput: as `context`.
        """
        self.context()  # With files that do not fit each other, gRPC would report that the service is unreachable.
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


# Processes may name each other in turn.
_MOST_TURNS = 4
# The longest pause while a model has no owner: it gets one when the lease of the last owner ends.
_LONGEST_SECONDS = 1.0


class Route:
    """The process to ask: one at an address of the endpoint, or the owner that such a process has named.

    The owner is asked with the endpoint's own rights, over the same scheme: with TLS it shows a certificate of the
    same CA. A token is not sent to another machine over plain text unless the endpoint allows that. If the owner
    may not be asked, the endpoint's next address is.

    Attributes:
        endpoint: the process to ask now.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._all = endpoint.alone()
        random.shuffle(self._all)  # Many clients should not all ask the same one first.
        self._next, self._turns = 0, 0
        # Whether a process has named another owner since the last pause, and before it.
        self._moving = self._moves = False
        self.endpoint = self._all[0]

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """The JSON answer to an HTTP request, of the process that owns the model; see `Endpoint.ask`."""
        while True:
            try:
                return self.endpoint.ask(method, path, body, patience_seconds)
            except DeltasyncError as error:
                if not self.turn(error):
                    raise

    def answered(self) -> None:
        """Note that the process has answered: it is the one to ask."""
        self._turns = 0

    def turn(self, error: DeltasyncError) -> bool:
        """Choose another process after an error, if the error calls for one.

        Returns:
            Whether to ask it at once; otherwise it is time for a pause.
        """
        self._turns += 1
        self._moving |= isinstance(error, NotOwner)
        if isinstance(error, NotOwner) and (owner := self._owner(error)):
            self.endpoint = owner
            return self._turns <= _MOST_TURNS or self._pause()
        if not isinstance(error, ServiceUnavailable):
            return False
        self._next = (self._next + 1) % len(self._all)
        self.endpoint = self._all[self._next]
        unasked = not isinstance(error, NotOwner) and self._turns < len(self._all)
        return unasked or self._pause()

    def pause(self, seconds: float) -> float:
        """How long to pause: `seconds`, or less if processes have just named another owner of the model."""
        return min(seconds, random.uniform(0.1, 1.0) * _LONGEST_SECONDS) if self._moves else seconds  # noqa: S311

    def _pause(self) -> bool:
        self._turns, self._moves, self._moving = 0, self._moving, False
        return False

    def _owner(self, error: NotOwner) -> Endpoint | None:
        """The endpoint of the owner that an error names; None if it names none, or one that may not be asked."""
        if error.owner is None:
            return None
        try:
            return self._all[0].at(error.owner)
        except InvalidInput:
            return None
