"""Where a service is reached, with which rights, and which of its processes a client asks next."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from deltasync.access.roles import checked_token
from deltasync.base.errors import Contradiction, DeltasyncError, NotOwner, Owner, ServiceUnavailable
from deltasync.cli.endpoint_options import operator_options, service_options
from deltasync.client import Admin, Endpoint, InvalidInput
from deltasync.client.endpoint import Route, endpoint_settings

TOKEN = "hush"  # noqa: S105
ALL = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


def test_an_address_alone_is_an_endpoint_without_rights() -> None:
    assert Endpoint.of_grpc("h:1") == Endpoint("h:1", token="")
    assert Endpoint.of_http("http://h:1") == Endpoint("http://h:1", token="")
    endpoint = Endpoint("localhost:1", "t", 2.0)
    assert Endpoint.of_grpc(endpoint) is endpoint


@pytest.mark.parametrize(
    ("kind", "addresses"),
    [
        (Endpoint.of_grpc, ["", "nowhere", "host:port", ":80", "http://h:80", "https://h:80"]),
        (Endpoint.of_http, ["", "nowhere", "h:80", "ftp://h:80", "http://", "http://h:port", "http://[::1"]),
    ],
)
def test_a_malformed_address_is_refused(kind: Callable[[Endpoint | str], Endpoint], addresses: list[str]) -> None:
    scheme = "http://" if kind == Endpoint.of_http else ""
    for address in addresses:
        for service in (address, Endpoint(address, "t"), f"{scheme}h:1,{address}"):
            with pytest.raises(InvalidInput, match=re.escape(f"service '{address}': expected {scheme}HOST:PORT")):
                kind(service)


def test_a_scheme_is_the_same_in_capitals() -> None:
    assert Endpoint("HTTPS://host:1").tls
    assert Endpoint(" HTTP://host:1 ").address == "http://host:1"


def test_a_token_is_shown_nowhere() -> None:
    endpoint = Endpoint("h:1", "hush")
    assert str(endpoint) == "h:1"
    assert "hush" not in repr(endpoint)


@pytest.mark.parametrize("token", [" hush", "hush\r\n", "\ufeffhush\n"])
def test_blanks_around_a_token_are_none_of_it(token: str, tmp_path: Path) -> None:
    assert Endpoint("h:1", token).token == TOKEN
    file = tmp_path / "token"
    file.write_text(token, "utf-8")
    assert checked_token("file", file.read_text("utf-8")) == TOKEN


@pytest.mark.parametrize("token", ["hu\nsh", "hüsh", "hu\x00sh", " ", "\udcff"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(InvalidInput, match="token: expected one line of printable ASCII characters") as refused:
        Endpoint("h:1", token)
    assert not token.strip() or token not in str(refused.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidInput, match=f"timeout_seconds: {seconds}"):
        Endpoint("h:1", timeout_seconds=seconds)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "endpoint.toml"
    path.write_text(
        'address = "file:1"\nhttp = "https://file:2"\nca = "ca.pem"\nserver_name = "in.file"\n'
        'token_file = "secrets/token"\n'
    )
    return path


def test_arguments_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    environment = {"DELTASYNC_ENDPOINT": str(file), "DELTASYNC_SERVER_NAME": "in.environment"}
    found = endpoint_settings({"address": "given:1", "ca": None}, environment)
    assert found == {
        "address": "given:1",
        "http": "https://file:2",
        "ca": file.parent / "ca.pem",
        "server_name": "in.environment",
        "token_file": file.parent / "secrets" / "token",
    }
    assert endpoint_settings({"server_name": "given"}, environment)["server_name"] == "given"


@pytest.mark.parametrize(
    ("given", "environment", "wanted"),
    [
        ({"token_file": "f"}, {"DELTASYNC_TOKEN": "t"}, {"token_file": "f"}),
        ({"token": "g"}, {"DELTASYNC_TOKEN_FILE": "f"}, {"token": "g"}),
        ({}, {"DELTASYNC_TOKEN": "t", "DELTASYNC_TOKEN_FILE": "f", "DELTASYNC_ADMIN_TOKEN": "a"}, {"token": "t"}),
        ({}, {"DELTASYNC_TOKEN_FILE": "f", "DELTASYNC_ADMIN_TOKEN": "a"}, {"token_file": "f"}),
        ({}, {"DELTASYNC_ADMIN_TOKEN": "a"}, {"token": "a"}),
    ],
)
def test_one_token_is_instead_of_another(
    given: dict[str, Any], environment: dict[str, str], wanted: dict[str, Any]
) -> None:
    assert endpoint_settings(given, environment) == wanted


def test_an_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    with pytest.raises(InvalidInput, match="no address of the service: pass it"):
        Endpoint.from_environment()
    monkeypatch.setenv("DELTASYNC_HTTP", "http://there:2")
    assert Endpoint.of_http(Endpoint.from_environment()).address == "http://there:2", "all that operators need"
    monkeypatch.delenv("DELTASYNC_HTTP")
    monkeypatch.setenv("DELTASYNC_SERVICE", "there:1")
    monkeypatch.setenv("DELTASYNC_CA", "ca.pem")
    assert Endpoint.from_environment(by="anna") == Endpoint("there:1", by="anna", ca="ca.pem")
    assert Endpoint.from_file(file).address == "file:1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('token = "hush"', "unknown key 'token'; keys: address, http, server_name, ca"),
        ("address = 1", "address: expected a string"),
        ("address = ", "endpoint.toml: "),
        ("", "no address; set the key"),
    ],
)
def test_a_wrong_file_says_what(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "endpoint.toml").write_text(content)
    with pytest.raises(InvalidInput, match=said):
        Endpoint.from_file(tmp_path / "endpoint.toml")
    with pytest.raises(InvalidInput, match=r"none.toml: No such file"):
        Endpoint.from_file(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "host", ["there", "10.0.0.1", "[2001:db8::1]", "localhost.an.example", "127.0.0.1.example"]
)
def test_a_token_is_not_sent_over_plain_text_to_another_machine(host: str) -> None:
    every: list[dict[str, Any]] = [{"token": TOKEN}, {"token_file": "f"}]
    for rights in every:
        with pytest.raises(InvalidInput, match="in plain text") as refused:
            Admin(Endpoint(f"http://{host}:1", **rights))
        assert "hush" not in str(refused.value)
        with pytest.raises(InvalidInput, match="in plain text"):
            Endpoint(f"{host}:1", **rights).channel()
        with pytest.raises(InvalidInput, match="in plain text"):
            Admin(Endpoint(f"http://{host}:1", **rights)).consumer("c")
    Admin(Endpoint(f"http://{host}:1", "hush", insecure=True))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "[::1]"])
def test_this_machine_is_told_a_token(host: str) -> None:
    Admin(Endpoint(f"http://{host}:1", "hush"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cert": "c"}, "cert and key belong together"),
        ({"key": "k"}, "cert and key belong together"),
        ({"token": "t", "token_file": "f"}, "set only one of them"),
        ({"cert": "c", "key": "k"}, "cert needs TLS: set ca"),
        ({"server_name": "n"}, "server_name needs TLS: set ca"),
        ({"address": "http://h:1", "ca": "c"}, "ca needs TLS: use https://"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, str], said: str) -> None:
    arguments = {"address": "localhost:1", **settings}
    with pytest.raises(InvalidInput, match=said):
        (Endpoint.of_http if "http" in arguments["address"] else Endpoint.of_grpc)(Endpoint(**arguments))  # type: ignore[arg-type]


def test_http_beside_grpc_is_where_status_is_asked_for() -> None:
    endpoint = Endpoint("localhost:1", http="http://localhost:2", by="anna")
    assert Endpoint.of_http(endpoint) == Endpoint("http://localhost:2", by="anna")


def shown(arguments: list[str], option: Any, **environment: str) -> tuple[int, str]:
    def command(**settings: Endpoint) -> None:
        (endpoint,) = settings.values()
        click.echo(f"{endpoint!r} {endpoint.token}")

    whole = click.command(context_settings={"auto_envvar_prefix": "DELTASYNC"})(option(command))
    done = CliRunner().invoke(whole, arguments, env=environment)
    return done.exit_code, done.output


def test_commands_take_the_same_settings(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush\n")
    file = tmp_path / "endpoint.toml"
    file.write_text('address = "localhost:7"\nhttp = "http://localhost:8"\ntoken_file = "token"\n')
    both = {"DELTASYNC_SERVICE": "localhost:9", "DELTASYNC_HTTP": "http://localhost:8"}
    http = "http://localhost:9"
    for arguments, option, environment, expected in (
        (["--endpoint", str(file)], service_options(), {}, "address='localhost:7'"),
        (["--endpoint", str(file)], operator_options(), {}, "address='http://localhost:8'"),
        ([], operator_options(), {"DELTASYNC_HTTP": http}, f"address='{http}'"),
        ([], operator_options(), {"DELTASYNC_SERVICE": http}, f"address='{http}'"),
        ([], operator_options(), {}, "address='http://127.0.0.1:8080'"),
        ([], service_options(), both, "address='localhost:9'"),
        ([], operator_options(), both, "address='http://localhost:8'"),
        (["--service", "localhost:7"], service_options(), both, "http='http://localhost:8'"),
        (["--service", "http://localhost:7"], operator_options(), both, "address='http://localhost:7'"),
        ([], service_options(), {"DELTASYNC_SERVICE": "localhost:9"}, "address='localhost:9'"),
        ([], service_options(), {}, "address='127.0.0.1:50051'"),
        ([], service_options(), {"DELTASYNC_ADMIN_TOKEN": TOKEN}, " hush\n"),
    ):
        assert expected in shown(arguments, option, **environment)[1], (arguments, environment)
    code, said = shown([], operator_options(), DELTASYNC_SERVICE="localhost:9")
    assert (code, "expected http://HOST:PORT, by default port 8080" in said) == (2, True)
    code, said = shown([], service_options(), DELTASYNC_SERVICE="http://localhost:9")
    assert (code, "expected HOST:PORT of gRPC, by default port 50051" in said) == (2, True)
    assert shown([], service_options(default=None))[0] == 2
    code, said = shown(["--service", "there:1"], service_options(), DELTASYNC_TOKEN=TOKEN)
    assert (code, "in plain text" in said, "hush" in said) == (2, True, False)
    assert shown(["--service", "there:1", "--insecure"], service_options(), DELTASYNC_TOKEN=TOKEN)[0] == 0


def test_no_secret_is_an_argument() -> None:
    code, said = shown(["--admin-token", "hush"], operator_options(changes=True))
    assert (code, "No such option" in said) == (2, True)


def route(addresses: list[str] = ALL, **settings: str) -> Route:
    return Route(Endpoint.of_grpc(Endpoint(",".join(addresses), **settings)))  # type: ignore[arg-type]


def named(grpc: str) -> NotOwner:
    return NotOwner("another has it", owner=Owner("p", grpc, "http://127.0.0.1:9"))


@pytest.mark.parametrize("addresses", [ALL, ALL[:1]])
def test_each_is_asked_once_before_a_pause(addresses: list[str]) -> None:
    one = route(addresses)
    asked = [one.endpoint.address]
    while one.turn(ServiceUnavailable("gone")):
        asked.append(one.endpoint.address)
    assert sorted(asked) == addresses
    assert one.endpoint.address == asked[0]


def test_the_owner_that_is_named_is_asked_at_once() -> None:
    one = route()
    assert one.turn(named("127.0.0.1:7"))
    assert one.endpoint.address == "127.0.0.1:7"
    one.turn(ServiceUnavailable("it is gone, too"))
    assert one.endpoint.address in ALL


@given(st.lists(st.sampled_from(["127.0.0.1:7", "127.0.0.1:8"]), min_size=20, max_size=40))
def test_processes_that_name_each_other_are_given_a_pause(owners: list[str]) -> None:
    one = route()
    at_once = [one.turn(named(owner)) for owner in owners]
    assert all(False in at_once[start : start + 6] for start in range(len(owners) - 5))


def test_where_the_owner_is_not_known_it_is_time_for_a_pause() -> None:
    assert not route().turn(NotOwner("nobody has it"))


@pytest.mark.parametrize("error", [InvalidInput("x"), Contradiction("x")])
def test_what_another_process_would_answer_too_is_asked_of_none(error: DeltasyncError) -> None:
    one = route()
    before = one.endpoint
    assert not one.turn(error)
    assert one.endpoint == before


@pytest.mark.parametrize("address", ["elsewhere.example:7", "no address"])
def test_a_route_ignores_owners_that_it_cannot_use_safely(address: str) -> None:
    one = route(token="secret")  # noqa: S106
    one.turn(named(address))
    assert one.endpoint.address in ALL


def test_several_addresses_of_http_are_asked_likewise() -> None:
    one = Route(Endpoint.of_http("http://127.0.0.1:1,http://127.0.0.1:2"))
    assert one.turn(named("127.0.0.1:7"))
    assert one.endpoint.address == "http://127.0.0.1:9"


def test_pauses_are_short_while_processes_say_that_a_model_moves() -> None:
    one = route()
    assert one.pause(5.0) == 5.0
    one.turn(NotOwner("nobody has it"))
    found = {one.pause(5.0) for _ in range(100)}
    assert len(found) > 90
    assert 0.1 <= min(found) < max(found) <= 1.0
    assert one.pause(0.05) == 0.05
    while one.turn(ServiceUnavailable("all are gone")):
        pass
    assert one.pause(5.0) == 5.0
