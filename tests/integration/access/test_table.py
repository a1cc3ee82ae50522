"""Every call and every route, with each role: what the table says is what happens."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from tests.support.guarded import ROLES, GuardedService
from tests.support.http import routes
from tests.support.wire import publish_open, subscribe_open

from deltasync.access.rights import CALLS, Need, need_of_call, need_of_request
from deltasync.access.roles import Role, grants
from deltasync.v1 import publish_pb2, subscribe_pb2

DENIED, OK = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK
# Nobody, tokens that nobody knows, and each that somebody does.
CALLERS = ["", "stranger", *ROLES, "admin token"]
# Beyond the role: a first message for which the callers that have it have it, too.
FIRST = {
    "Publish": publish_open(model="clicks-new"),
    "Subscribe": subscribe_open(consumer="predictors"),
    "Leave": subscribe_pb2.LeaveRequest(consumer="predictors", replica="r"),
    "ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(list_services=""),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedService]:
    with GuardedService(tmp_path_factory.mktemp("guarded")) as running:
        yield running


def allowed(name: str, role: Role | None) -> bool:
    if role is None:
        return True
    texts = ["admin"] if name == "admin token" else ROLES.get(name, [])
    return any(each.covers(role, None) for each in grants(texts))


@pytest.mark.parametrize("method", [*CALLS, "/deltasync.v1.PublishService/Unheard"])
def test_a_call_is_let_in_with_its_role_alone(service: GuardedService, method: str) -> None:
    need, name = need_of_call(method), method.rpartition("/")[2]
    for caller in CALLERS:
        code, said = service.call(method, caller, FIRST.get(name, b""))
        assert (code is not DENIED) is (allowed(caller, need.role) or name == "Unheard"), (caller, code, said)
        if code is DENIED:
            assert need.role
            assert f"role {need.role.value}" in said
            assert "XYZZY" not in said
            assert not [each for each in ROLES if f"{each!r}" in said and each != caller]


def test_a_route_is_let_in_with_its_role_alone(service: GuardedService) -> None:
    for method, route in (*routes(), ("GET", "/unheard"), ("POST", "/tables")):
        role = need_of_request(method, route).role
        name = "predictors" if role is Role.SUBSCRIBE else "nobody"  # The pattern of the role has this consumer.
        path = route.format(name=name, replica="r", table="t", version="1")
        for caller in CALLERS:
            status, said = service.ask(method, path, caller)
            assert (status != 403) is allowed(caller, role), (method, path, caller, status, said)
            if status == 403:
                assert role
                assert f"role {role.value}" in said


@pytest.mark.parametrize(
    ("method", "caller", "message", "let_in"),
    [
        ("PublishService/Publish", "trainer", publish_open(model="clicks-new"), True),
        ("PublishService/Publish", "trainer", publish_open(model="other"), False),
        ("SubscribeService/Subscribe", "predictor", subscribe_open(consumer="predictors"), True),
        ("SubscribeService/Subscribe", "predictor", subscribe_open(consumer="others"), False),
        ("SubscribeService/Leave", "predictor", subscribe_pb2.LeaveRequest(consumer="others"), False),
    ],
)
def test_a_role_is_for_the_names_that_it_names(
    service: GuardedService, method: str, caller: str, message: object, *, let_in: bool
) -> None:
    code, said = service.call(f"/deltasync.v1.{method}", caller, message)
    assert (code is OK) is let_in, said
    if not let_in:
        assert code is DENIED
        assert f"{caller!r} has no role" in said


def test_who_subscribes_may_object_for_the_names_that_the_role_names(service: GuardedService) -> None:
    for name, status in (("predictors", 200), ("others", 403)):
        assert service.ask("POST", f"/consumers/{name}/object", "predictor", b'{"reason": "bad"}')[0] == status


def test_who_may_not_is_refused_before_a_message(service: GuardedService) -> None:
    """Nothing is sent, and yet there is an answer."""
    with grpc.insecure_channel(service.grpc) as channel:
        for method in ("PublishService/Publish", "SubscribeService/Subscribe"):
            stream: Any = channel.stream_stream(f"/deltasync.v1.{method}")
            with pytest.raises(grpc.RpcError) as refused:
                next(stream(endless(), timeout=20))
            assert refused.value.code() is DENIED


def endless() -> Iterator[bytes]:
    """Messages that never come."""
    threading.Event().wait(25)
    yield b""


def test_a_name_that_is_too_long_to_be_one_is_not_compared(service: GuardedService) -> None:
    code, said = service.call("/deltasync.v1.PublishService/Publish", "trainer", publish_open(model="c" * 10**6))
    assert (code, "at most 128" in said) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_all_calls_are_in_the_table() -> None:
    modules = (publish_pb2, subscribe_pb2)
    services = [each for module in modules for each in module.DESCRIPTOR.services_by_name.values()]
    ours = {f"/{each.full_name}/{method.name}" for each in services for method in each.methods}
    assert {name for name in CALLS if name.startswith("/deltasync.")} == ours


@pytest.mark.parametrize("path", ["/tables/", "//livez", "/livez/", "/livez\n", "/page/", "/page/a/b", ""])
def test_a_route_that_does_not_exist_needs_a_role(path: str) -> None:
    assert need_of_request("GET", path) == need_of_request("HEAD", path) == Need(Role.READ)
    for method in ("POST", "PATCH", "CONNECT"):
        assert need_of_request(method, path) == Need(Role.ADMIN)


def test_a_call_in_no_table_needs_admin() -> None:
    for method in ("", "/deltasync.v1.PublishService/publish", "/deltasync.v2.PublishService/Publish"):
        assert need_of_call(method) == Need(Role.ADMIN)


def test_the_page_says_which_role_each_call_needs() -> None:
    page = (Path(__file__).parents[3] / "sync_service/docs/security.md").read_text()
    lines = page.partition("\n## Roles\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    http, rpc = ({re.split("[`:]", row[0].strip("`"))[0]: row[at] for row in rows} for at in (2, 3))
    assert http.keys() == {"none", *(role.value for role in Role)}
    for method, route in routes():
        need = need_of_request(method, route)
        path = re.sub(r"\{(\w+)\}", r"<\1>", route)
        named = [role for role, cell in http.items() if f"`{method} {path}`" in cell]
        role = named[0] if named else "read" if method == "GET" else "admin"
        assert (need.role.value if need.role else "none") == role, route
    assert http["read"] == "every other `GET`"
    assert set(re.findall("`(\\w+)`", http["admin"])) == {method for method, _ in routes()} - {"GET"}
    for call, need in CALLS.items():
        service, _, method = call.strip("/").rpartition("/")
        words = (f"`{service.removeprefix('deltasync.v1.')}/{method}`", f"`{service}`", "server reflection")
        [role] = [
            name
            for name, cell in rpc.items()
            if any(each in cell for each in words[:2]) or ("reflection" in service and words[2] in cell)
        ]
        assert role == (need.role.value if need.role else "none"), call
