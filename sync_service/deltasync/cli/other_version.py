"""Errors that a command and a service of different versions cause."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from deltasync.client.endpoint import Endpoint
from deltasync.core.build import built_commit, built_version
from deltasync.core.errors import (
    DeltasyncError,
    InvalidInput,
    NotFound,
    NotPermitted,
    ServiceFailed,
    ServiceUnavailable,
)

# What a service answers that lacks a route, a key or a parameter, or has another meaning for it.
_MAY_BE = (InvalidInput, NotPermitted, ServiceFailed, ServiceUnavailable)
_NO_ROUTE = "/openapi.json names all routes"
_SECONDS = 2.0
_SHOWN = 12


@contextmanager
def naming_versions(service: Endpoint) -> Iterator[None]:
    """In the block, an error that a service of another version explains names both versions.

    The service is asked for its version once there is such an error, for two seconds at most.
    """
    try:
        yield
    except DeltasyncError as error:
        if hint := _hint(error, service):
            raise type(error)(f"{error}; {hint}") from error
        raise
    except KeyError as error:
        if hint := _difference(service):
            raise ServiceUnavailable(f"the answer has no {error}; {hint}") from error
        raise


def _hint(error: DeltasyncError, service: Endpoint) -> str:
    if not isinstance(error, _MAY_BE) and not (isinstance(error, NotFound) and _NO_ROUTE in str(error)):
        return ""
    if hint := _difference(service):
        return hint
    if isinstance(error, ServiceUnavailable) and ": HTTP 404: " in str(error):
        ours = _words(built_version(), built_commit())
        return f"this command is deltasync {ours}; is that a deltasync service there, and of which version?"
    return ""


def _difference(service: Endpoint) -> str:
    """How the service's version differs, and what to do; empty where it does not, or does not say which it has."""
    try:
        said = replace(Endpoint.of_http(service).alone()[0], timeout_seconds=_SECONDS).get_json("/version")
        version, commit = str(said["version"]), str(said.get("commit") or "")
    except (DeltasyncError, AttributeError, LookupError, TypeError):
        return ""
    ours, our_commit = built_version(), built_commit()
    same = not (commit and our_commit) or commit.removesuffix("-dirty") == our_commit.removesuffix("-dirty")
    if version == ours and same:
        return ""
    return (
        f"this command is deltasync {_words(ours, our_commit)}, the service {_words(version, commit)}: use a "
        "command of the service's version, or update the service"
    )


def _words(version: str, commit: str) -> str:
    return (version or "of an unknown version") + (f" (commit {commit[:_SHOWN]})" if commit else "")
