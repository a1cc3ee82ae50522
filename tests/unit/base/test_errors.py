import re
from typing import Any

import grpc
import pytest

from deltasync.base import errors
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceFailed, ServiceUnavailable
from deltasync.wire import errors as api


def below(kind: type[DeltasyncError]) -> list[type[DeltasyncError]]:
    """The kinds directly below one, without those of other modules."""
    return [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]


KINDS = below(DeltasyncError)
TREE = [each for kind in KINDS for each in (kind, *below(kind))]
TOO_LARGE = "Received message larger than max (2 vs. 1)"


class Failed(grpc.RpcError, grpc.Call):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, name: str) -> None:
        self._code, self._details, self._name = code, details, name

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return ((api.ERROR_KEY, self._name),) if self._name else ()


def failed(code: grpc.StatusCode, details: str, name: str = "") -> grpc.RpcError:
    kind = type("Failed", (Failed,), {"__abstractmethods__": frozenset()})
    return kind(code, details, name)  # type: ignore[no-any-return]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert drawn == [kind.__name__ for kind in TREE]


def test_every_error_has_a_code_and_a_status() -> None:
    codes = [api.grpc_code(kind("why")) for kind in KINDS]
    assert len({api.http_status(kind("why")) for kind in KINDS if kind is not errors.Superseded}) == len(KINDS) - 1
    assert grpc.StatusCode.INTERNAL not in codes
    assert all(400 <= api.http_status(kind("why")) < 600 for kind in KINDS)
    assert (api.grpc_code(DeltasyncError()), api.http_status(DeltasyncError())) == (grpc.StatusCode.INTERNAL, 500)


@pytest.mark.parametrize("kind", TREE)
def test_an_error_comes_back_as_what_it_was(kind: type[DeltasyncError]) -> None:
    back = api.from_rpc_error(failed(api.grpc_code(kind("why")), "why", kind.__name__), "host:1")
    assert type(back) is kind
    names_the_service = kind is ServiceFailed or issubclass(kind, ServiceUnavailable)
    assert str(back) == ("host:1: why" if names_the_service else "why")


@pytest.mark.parametrize(
    ("code", "details", "kind", "said"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "why", errors.StorageFailed, "why"),  # The first of its code.
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TOO_LARGE, InvalidInput, TOO_LARGE),  # It is not sent again.
        (grpc.StatusCode.CANCELLED, "", ServiceUnavailable, "host:1: no details"),
        (grpc.StatusCode.INTERNAL, "", ServiceUnavailable, "host:1: no details"),
    ],
)
def test_errors_without_a_name_are_told_by_their_code(
    code: grpc.StatusCode, details: str, kind: type[DeltasyncError], said: str
) -> None:
    error = api.from_rpc_error(failed(code, details), "host:1")
    assert type(error) is kind
    assert said in str(error)
    assert api.is_final(error) is (kind is InvalidInput)


def test_which_errors_are_final() -> None:
    again = {kind.__name__ for kind in TREE if not api.is_final(kind())}
    assert again == {"Superseded", "LimitReached", "Damaged", "StorageFailed", "ServiceUnavailable", "NotOwner"}


def test_invalid_input_and_not_found_are_what_python_calls_them() -> None:
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(errors.NotFound, LookupError)
