"""Where an endpoint's settings come from, and what of them is refused."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.cli.endpoint_options import operator_options, service_options
from deltasync.client import Admin, Endpoint, InvalidInput
from deltasync.client.endpoint_settings import endpoint_settings
from deltasync.client.status import fetch_lag

TOKEN = "hush"  # noqa: S105


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
    with pytest.raises(InvalidInput, match="no address of the service: give it"):
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
        ("address = 1", "address: expected a text"),
        ("address = ", "endpoint.toml: "),
        ("", "there is no address"),
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
        with pytest.raises(InvalidInput, match="not sent over plain text") as refused:
            Admin(Endpoint(f"http://{host}:1", **rights))
        assert "hush" not in str(refused.value)
        with pytest.raises(InvalidInput, match="not sent over plain text"):
            Endpoint(f"{host}:1", **rights).channel()
        with pytest.raises(InvalidInput, match="not sent over plain text"):
            fetch_lag(Endpoint(f"http://{host}:1", **rights), "c")
    Admin(Endpoint(f"http://{host}:1", "hush", insecure=True))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.0.1", "[::1]"])
def test_this_machine_is_told_a_token(host: str) -> None:
    Admin(Endpoint(f"http://{host}:1", "hush"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cert": "c"}, "cert and key: give both, or none"),
        ({"key": "k"}, "cert and key: give both, or none"),
        ({"token": "t", "token_file": "f"}, "give one of them"),
        ({"cert": "c", "key": "k"}, "cert is for TLS: give ca"),
        ({"server_name": "n"}, "server_name is for TLS: give ca"),
        ({"address": "http://h:1", "ca": "c"}, "ca is for TLS: say https://"),
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
    assert "address='localhost:7'" in shown(["--endpoint", str(file)], service_options())[1]
    assert "address='http://localhost:8'" in shown(["--endpoint", str(file)], operator_options())[1]
    assert "address='http://localhost:9'" in shown([], operator_options(), DELTASYNC_HTTP="http://localhost:9")[1]
    assert (
        "address='http://localhost:9'" in shown([], operator_options(), DELTASYNC_SERVICE="http://localhost:9")[1]
    )
    assert "address='http://127.0.0.1:8080'" in shown([], operator_options())[1]
    both = {"DELTASYNC_SERVICE": "localhost:9", "DELTASYNC_HTTP": "http://localhost:8"}
    assert "address='localhost:9'" in shown([], service_options(), **both)[1]
    assert "address='http://localhost:8'" in shown([], operator_options(), **both)[1]
    assert "http='http://localhost:8'" in shown(["--service", "localhost:7"], service_options(), **both)[1]
    assert (
        "address='http://localhost:7'" in shown(["--service", "http://localhost:7"], operator_options(), **both)[1]
    )
    code, said = shown([], operator_options(), DELTASYNC_SERVICE="localhost:9")
    assert (code, "expected http://HOST:PORT, by default port 8080" in said) == (2, True)
    code, said = shown([], service_options(), DELTASYNC_SERVICE="http://localhost:9")
    assert (code, "expected HOST:PORT, of gRPC: by default port 50051" in said) == (2, True)
    assert "address='localhost:9'" in shown([], service_options(), DELTASYNC_SERVICE="localhost:9")[1]
    assert "address='127.0.0.1:50051'" in shown([], service_options())[1]
    assert shown([], service_options(default=None))[0] == 2
    assert shown([], service_options(), DELTASYNC_ADMIN_TOKEN=TOKEN)[1].endswith(" hush\n")
    code, said = shown(["--service", "there:1"], service_options(), DELTASYNC_TOKEN=TOKEN)
    assert (code, "not sent over plain text" in said, "hush" in said) == (2, True, False)
    assert shown(["--service", "there:1", "--insecure"], service_options(), DELTASYNC_TOKEN=TOKEN)[0] == 0


def test_no_secret_is_an_argument() -> None:
    code, said = shown(["--admin-token", "hush"], operator_options(changes=True))
    assert (code, "No such option" in said) == (2, True)
