"""Convert errors to and from gRPC codes and HTTP statuses, and check the protocol version."""

import re
from collections.abc import Mapping

import grpc

from deltasync.base.errors import (
    Contradiction,
    Damaged,
    DeltasyncError,
    InvalidInput,
    LimitReached,
    NotFound,
    NotOwner,
    NotPermitted,
    Owner,
    ResyncRequired,
    RunRefused,
    ServiceFailed,
    ServiceUnavailable,
    StorageFailed,
    Superseded,
)
from deltasync.base.process import built_version
from deltasync.base.words import printable

_CODES: list[tuple[type[DeltasyncError], grpc.StatusCode, int]] = [
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED, 403),
    (NotFound, grpc.StatusCode.NOT_FOUND, 404),
    (Contradiction, grpc.StatusCode.FAILED_PRECONDITION, 409),
    (RunRefused, grpc.StatusCode.FAILED_PRECONDITION, 409),
    (Superseded, grpc.StatusCode.ABORTED, 409),
    (ResyncRequired, grpc.StatusCode.DATA_LOSS, 410),
    (Damaged, grpc.StatusCode.OUT_OF_RANGE, 422),
    (ServiceFailed, grpc.StatusCode.UNKNOWN, 500),  # gRPC's own code for an unexpected exception.
    (ServiceUnavailable, grpc.StatusCode.UNAVAILABLE, 503),
    (NotOwner, grpc.StatusCode.UNAVAILABLE, 307),
    (StorageFailed, grpc.StatusCode.RESOURCE_EXHAUSTED, 507),
    (LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
]

# Clients put the service's words into errors and logs, so they are limited to one line of this length.
_LONGEST, _LONGEST_ADDRESS = 4_000, 300

# Trailing metadata with the error's name, since errors may share a code. Without it, a code's first error counts.
ERROR_KEY = "deltasync-error"
# For `NotOwner` also: the process that owns the model, and its addresses.
_OWNER_KEYS = {"process": "deltasync-owner", "grpc": "deltasync-owner-grpc", "http": "deltasync-owner-http"}

# gRPC's own answer to a message over the limit. Sending it again cannot help.
_TOO_LARGE = "larger than max"


def grpc_code(error: DeltasyncError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return next((code for _, code, _ in _kinds(error)), grpc.StatusCode.INTERNAL)


def http_status(error: DeltasyncError) -> int:
    """The HTTP status of an error."""
    return next((status for _, _, status in _kinds(error)), 500)


def error_name(error: DeltasyncError) -> str:
    """The name of an error for clients; a subclass has the name of its base class."""
    return next((kind.__name__ for kind, _, _ in _kinds(error)), type(error).__name__)


def _kinds(error: DeltasyncError) -> list[tuple[type[DeltasyncError], grpc.StatusCode, int]]:
    """The rows of the table that match an error, the closest class first."""
    return sorted((each for each in _CODES if isinstance(error, each[0])), key=lambda each: -len(each[0].__mro__))


def http_errors() -> dict[int, list[str]]:
    """The names of the errors by HTTP status."""
    names: dict[int, list[str]] = {}
    for kind, _, status in _CODES:
        names.setdefault(status, []).append(kind.__name__)
    return names


def error_named(name: object) -> type[DeltasyncError] | None:
    """The error class that an HTTP answer names, or None."""
    return next((kind for kind, _, _ in _CODES if kind.__name__ == name), None)


def error_metadata(error: DeltasyncError) -> tuple[tuple[str, str], ...]:
    """The trailing metadata of a call that ends with an error."""
    owner = error.owner if isinstance(error, NotOwner) else None
    owner_entries = tuple((key, getattr(owner, name)) for name, key in _OWNER_KEYS.items()) if owner else ()
    return ((ERROR_KEY, error_name(error)), *owner_entries)


def _owner(metadata: Mapping[str, str | bytes]) -> Owner | None:
    """The owner in trailing metadata, or None. The metadata come from a peer and are not trusted."""
    texts = {name: printable(str(metadata.get(key, "")), _LONGEST_ADDRESS) for name, key in _OWNER_KEYS.items()}
    return Owner(texts["process"], texts["grpc"], texts["http"]) if texts["grpc"] else None


def from_rpc_error(error: grpc.RpcError, target: str) -> DeltasyncError:
    """The service's error in a failed call to `target`, or `ServiceUnavailable`."""
    if not isinstance(error, grpc.Call):
        return ServiceUnavailable(f"{target}: {error}")
    code, details = error.code(), printable(error.details() or "no details", _LONGEST)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{target} does not know this call ({details}): is it a deltasync service of this version"
        return ServiceUnavailable(f"{text} ({built_version() or 'unknown'})? GET /version shows its version")
    if _TOO_LARGE in details:
        return InvalidInput(f"{target}: {details}")
    metadata = dict(error.trailing_metadata() or ())
    named = metadata.get(ERROR_KEY, "")
    kinds = [kind for kind, kind_code, _ in _CODES if kind_code is code] or [ServiceUnavailable]
    kind = next((kind for kind in kinds if kind.__name__ == named), kinds[0])
    if kind is NotOwner:
        return NotOwner(f"{target}: {details}", owner=_owner(metadata))
    return kind(f"{target}: {details}" if kind in (ServiceFailed, ServiceUnavailable) else details)


def of_connection(error: grpc.RpcError) -> bool:
    """Whether a failed call is a network error, not an error of the service itself."""
    return not isinstance(error, grpc.Call) or ERROR_KEY not in dict(error.trailing_metadata() or ())


def is_final(error: DeltasyncError) -> bool:
    """Whether the same call would fail again."""
    return not isinstance(error, Superseded | Damaged | LimitReached | StorageFailed | ServiceUnavailable)


PROTOCOL = 1

_KEY = "deltasync-protocol"
_UNNAMED = "1"  # The protocol of a call without the entry, such as a manual one.
_FORM = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SHOWN = 40


def protocol_to_metadata(protocol: int = PROTOCOL) -> tuple[str, str]:
    """The metadata entry with the client's protocol version."""
    return _KEY, str(protocol)


def check_protocol(metadata: Mapping[str, str | bytes]) -> None:
    """Check that the client of a call has the service's protocol version."""
    text = str(metadata.get(_KEY, _UNNAMED))
    if not _FORM.fullmatch(text):
        raise InvalidInput(f"{_KEY}: {text[:_SHOWN]!r}, expected a number such as {PROTOCOL}")
    if (protocol := int(text)) != PROTOCOL:
        side = "service" if protocol > PROTOCOL else "client"
        raise Contradiction(
            f"the client speaks protocol {protocol}, the service protocol {PROTOCOL}: update the {side}"
        )
