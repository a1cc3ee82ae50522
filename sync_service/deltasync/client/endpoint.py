"""Where a service is reached, and with which rights. Whatever connects to one does it here."""

import os
import random
import ssl
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from deltasync.access.roles import checked_token
from deltasync.base.addresses import host_and_port, is_loopback, is_url, with_port
from deltasync.base.arguments import check_type
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, Owner, ServiceUnavailable
from deltasync.client.connection import note_connecting
from deltasync.client.http import HttpRequest, Tls, json_answer, meaning
from deltasync.wire.errors import from_rpc_error, of_connection, protocol_to_metadata

_PATHS = ("ca", "cert", "key", "token_file")
# Keys of the file, which are arguments too.
_KEYS = ("address", "http", "server_name", *_PATHS)
# Where each comes from in the environment, the first that is set.
_VARIABLES = {
    "address": "DELTASYNC_SERVICE",
    **{name: f"DELTASYNC_{name.upper()}" for name in ("http", "server_name", "ca", "cert", "key")},
}
# Likewise; of these only one counts.
_TOKENS = (
    ("token", "DELTASYNC_TOKEN"),
    ("token_file", "DELTASYNC_TOKEN_FILE"),
    ("token", "DELTASYNC_ADMIN_TOKEN"),
)
_FILE = "DELTASYNC_ENDPOINT"


def endpoint_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of an `Endpoint`.

    Args:
        given: those that are given; None and empty ones are not. `endpoint` is a path of the file, which else is
            what DELTASYNC_ENDPOINT says.
        environment: variables of the process.

    Raises:
        InvalidInput: the file cannot be read, or has other keys.
    """
    arguments = {name: value for name, value in given.items() if value not in (None, "")}
    file = arguments.pop("endpoint", None) or environment.get(_FILE)
    found: dict[str, Any] = {}
    for source in (file_settings(Path(file)) if file else {}, _variables(environment), arguments):
        if source.keys() & {"token", "token_file"}:  # One is instead of the other.
            found.pop("token", None)
            found.pop("token_file", None)
        found |= source
    return found


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
    found = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    tokens = [(name, environment[variable]) for name, variable in _TOKENS if environment.get(variable)]
    return found | dict(tokens[:1])


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


_Metadata: TypeAlias = tuple[tuple[str, str], ...]

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    # Inside the trusted network there is no proxy; one meant for the package index must not be asked.
    ("grpc.enable_http_proxy", 0),
    # A peer that hangs is found within 15 s; without the third one only after 65 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Retries are ours (see `backoff`); gRPC's own pause of up to two minutes would only add to them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In spite of its name, for how long an attempt may take: in less, none gets through a network with delays.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True)
class Endpoint:
    """Where a service is reached, and with which rights.

    Where an endpoint is asked for, a string will do too: it is one without rights, in plain text. Files are read
    anew for each connection: what is renewed in place is used from the next one on.

    Attributes:
        address: where trainers and replicas reach it, by gRPC: HOST:PORT. For operators alone it may be where it
            answers HTTP: http://HOST:PORT or https://HOST:PORT. Of a service of several processes the addresses of
            some, with commas: each knows who has what is asked for.
        token: what shows who calls; without one, and without a certificate, a service that knows roles refuses
            most calls.
        timeout_seconds: how long a call may take. Streams live as long as they are needed.
        by: who asks, told in the service's log beside what it changes.
        ca: PEM file of the CA that the service's certificate is from. With it gRPC speaks TLS; HTTP does by its
            address, without a file with the CAs of this machine.
        cert: PEM file of the client's own certificate.
        key: PEM file of its key.
        server_name: the name that the service's certificate is for, where it is not the host of the address.
        token_file: a file that has the token.
        http: where the same service answers HTTP, for operators.
        insecure: send a token over plain text to another machine, where anybody on the way can read it.

    Raises:
        InvalidInput: a token or a name that cannot be sent, no time, or files that do not go together. Whatever
            connects raises it too, where a file cannot be used, or a token would be sent over plain text.
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
        _check_text(by=self.by)
        if not self.timeout_seconds > 0:
            raise InvalidInput(f"timeout_seconds: {self.timeout_seconds}, expected more than 0")
        if self.token and self.token_file:
            raise InvalidInput(f"token and token_file {self.token_file}: give one of them")
        if bool(self.cert) != bool(self.key):
            raise InvalidInput("cert and key: give both, or none")

    def _check_secrecy(self) -> None:
        """Check that nothing secret would be sent over plain text."""
        if self.tls:
            return
        if named := [name for name in ("ca", "cert", "server_name") if getattr(self, name)]:
            how = "say https://" if is_url(self.address) else "give ca, the file of the service's CA"
            raise InvalidInput(f"service {self.address!r}: {named[0]} is for TLS: {how}, or leave {named[0]} out")
        if (self.token or self.token_file) and not self.insecure and not is_loopback(self._host):
            raise InvalidInput(
                f"service {self.address!r}: a token is not sent over plain text to another machine: give ca, or "
                "https://, or allow it with insecure"
            )

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
        missing = "give it, or set DELTASYNC_SERVICE, DELTASYNC_HTTP or DELTASYNC_ENDPOINT"
        return cls._of_settings(settings, f"no address of the service: {missing}")

    @classmethod
    def from_file(cls, path: Path | str) -> "Endpoint":
        """The endpoint that a TOML file describes, by the keys address, http, ca, cert, key, server_name and
        token_file. Paths are relative to its folder.

        Raises:
            InvalidInput: it cannot be read, has other keys or no address, or see `Endpoint`.
        """
        settings = file_settings(Path(path))
        return cls._of_settings(settings, f"endpoint {path}: there is no address")

    @classmethod
    def _of_settings(cls, settings: dict[str, Any], missing: str) -> "Endpoint":
        """An endpoint from its settings. For operators, `http` alone is an address; `missing` is the error."""
        where = settings.pop("address", "") or settings.get("http")
        if not where:
            raise InvalidInput(missing)
        return cls(where, **settings)

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
        """Where another process of the same service is asked, as this endpoint asks: by gRPC, or by HTTP.

        Raises:
            InvalidInput: that is no address, is one of HTTP with another scheme than this one's, or what is secret
                would be sent to it over plain text.
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
        """A gRPC channel, whose calls have these rights and say which protocol they speak.

        Raises:
            ServiceUnavailable: a file cannot be used now: perhaps it is being renewed. Or this process was forked
                from one that was connected.
        """
        self._check_secrecy()
        note_connecting()
        with _renewing():
            metadata = (protocol_to_metadata(), *self._rights().items())
            channel = self._secure_channel() if self.tls else grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        return grpc.intercept_channel(channel, _Calls(metadata, self.timeout_seconds))

    def get_json(self, path: str) -> Any:
        """The service's JSON answer to an HTTP GET of `path`; raises what `ask` does."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """The service's JSON answer to an HTTP request; None where it is empty.

        Args:
            method: GET, PUT, POST or DELETE.
            path: with the query.
            body: what is sent as JSON; None = nothing.
            patience_seconds: how long the answer may take, where that is longer than `timeout_seconds`.

        Raises:
            NotOwner: another process of the service is to be asked.
            DeltasyncError: the error that the service has answered.
            ServiceUnavailable: it does not answer in time, or not with JSON; or a file cannot be used now.
        """
        self._check_secrecy()
        with _renewing():
            context = self._files.context() if self.tls else None
            rights = self._rights()
        request = HttpRequest(
            self.address.rstrip("/") + path, rights, self.timeout_seconds, method, body, patience_seconds
        )
        return json_answer(request, Tls(context, self.server_name, self.cert is not None))

    def error_of(self, failure: grpc.RpcError) -> DeltasyncError:
        """The error that a failed call stands for: see `from_rpc_error`. Where there was no connection it says
        what that may mean.
        """
        error = from_rpc_error(failure, self.address)
        if isinstance(error, ServiceUnavailable) and of_connection(failure):
            means = meaning(str(error), tls=self.tls, certificate=self.cert is not None)
            return ServiceUnavailable(f"{error}: {means}") if means else error
        return error

    def _secure_channel(self) -> grpc.Channel:
        named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []
        return grpc.secure_channel(self.address, self._files.credentials(), [*_CHANNEL_OPTIONS, *named])

    def _rights(self) -> dict[str, str]:
        """What a call sends of them, and of who asks, as metadata in gRPC and as headers in HTTP."""
        token = self._read_token() if self.token_file else self.token
        rights = {"authorization": f"Bearer {token}"} if token else {}
        return rights | ({"deltasync-by": self.by} if self.by else {})

    def _read_token(self) -> str:
        try:
            token = Path(self.token_file or "").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"token_file {self.token_file}: {getattr(error, 'strerror', 'no text')}") from error
        return checked_token(f"token_file {self.token_file}", token)

    def _check_use(self) -> None:
        """Check what it is needed with: that it can be read, and may be sent."""
        self._check_secrecy()
        if self.tls:
            self._files.context()
        if self.token_file:
            self._read_token()

    @property
    def _files(self) -> TlsFiles:
        return TlsFiles(*(Path(path) if path else None for path in (self.ca, self.cert, self.key)))

    @property
    def _host(self) -> str:
        if is_url(self.address):
            return urllib.parse.urlsplit(self.address).hostname or ""
        return self.address.rpartition(":")[0].strip("[]")


@contextmanager
def _renewing() -> Iterator[None]:
    """Make an error of files one of now: they were right before, and may be so again."""
    try:
        yield
    except InvalidInput as error:
        raise ServiceUnavailable(f"{error}; it is tried again") from error


def _check_text(**texts: str) -> None:
    for name, text in texts.items():
        if not (text.isascii() and text.isprintable()):  # Say, a file's last line break.
            raise InvalidInput(f"{name}: expected only printable ASCII characters")


class _Calls(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Gives every call its metadata, and each that is no stream its timeout."""

    def __init__(self, metadata: _Metadata, timeout_seconds: float) -> None:
        self._metadata = metadata
        self._timeout_seconds = timeout_seconds

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], _call: Any, request: Any) -> Any:
        """Make a call."""
        return continuation(_Details(self._metadata, self._timeout_seconds), request)

    def intercept_stream_stream(self, continuation: Callable[[Any, Any], Any], _call: Any, requests: Any) -> Any:
        """Begin a stream."""
        return continuation(_Details(self._metadata, None), requests)


class _Details(grpc.ClientCallDetails):
    """What a call is made with; gRPC takes all that is not said here from the call itself."""

    def __init__(self, metadata: _Metadata, timeout: float | None) -> None:
        self.metadata = metadata
        self.timeout = timeout


# Processes that name each other are not followed for ever.
_MOST_TURNS = 4
# A model has a new owner after the lease, at the latest.
_LONGEST_SECONDS = 1.0


class Route:
    """The process to ask: one of those that the endpoint names, or the owner that one of them has named.

    An owner that was named is asked with the endpoint's own rights, over the same scheme: with TLS it shows a
    certificate of the same CA. A token is not sent to another machine over plain text unless the endpoint allows
    that. Where an owner may not be asked, the next of the endpoint's own addresses is.

    Attributes:
        endpoint: of the process to ask now.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._all = endpoint.alone()
        random.shuffle(self._all)  # Of many clients, not all ask the same one first.
        self._next, self._turns = 0, 0
        self._moving = self._moves = False  # By what was heard since the last pause, and before that.
        self.endpoint = self._all[0]

    def get_json(self, path: str) -> Any:
        """The JSON answer to an HTTP GET of `path`, of the process that has it; see `Endpoint.ask`."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """The JSON answer to an HTTP request, of the process that has what is asked for; see `Endpoint.ask`."""
        while True:
            try:
                return self.endpoint.ask(method, path, body, patience_seconds)
            except DeltasyncError as error:
                if not self.turn(error):
                    raise

    def answered(self) -> None:
        """Note that the process that was asked is the one to ask."""
        self._turns = 0

    def turn(self, error: DeltasyncError) -> bool:
        """Ask another process, as an error says, if it says so.

        Returns:
            Whether that is to be asked at once; else it is time for a pause.
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
        """How long to wait, instead of so many seconds, once it is time for a pause: not long where processes have
        just said that another has the model, or is to have it.
        """
        return min(seconds, random.uniform(0.1, 1.0) * _LONGEST_SECONDS) if self._moves else seconds  # noqa: S311

    def _pause(self) -> bool:
        self._turns, self._moves, self._moving = 0, self._moving, False
        return False

    def _owner(self, error: NotOwner) -> Endpoint | None:
        """Where the owner that an error names is asked; None where it names none that may be."""
        if error.owner is None:
            return None
        try:
            return self._all[0].at(error.owner)
        except InvalidInput:
            return None
