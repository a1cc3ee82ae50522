"""Where a service is reached, and with which rights."""

import re

import pytest
from click.testing import CliRunner

from deltasync.cli.main import cli
from deltasync.client import Admin, Endpoint, InvalidInput
from deltasync.client.status import fetch_lag


def test_an_address_alone_is_an_endpoint_without_rights() -> None:
    assert Endpoint.of_grpc("h:1") == Endpoint("h:1", token="")
    assert Endpoint.of_http("http://h:1") == Endpoint("http://h:1", token="")


def test_an_endpoint_stays_what_it_is() -> None:
    endpoint = Endpoint("localhost:1", "t", 2.0)
    assert Endpoint.of_grpc(endpoint) is endpoint


@pytest.mark.parametrize("address", ["", "nowhere", "host:port", ":80", "http://h:80", "https://h:80"])
def test_what_answers_no_grpc_is_refused(address: str) -> None:
    for service in (address, Endpoint(address, "t")):
        with pytest.raises(InvalidInput, match=f"service '{address}': expected HOST:PORT"):
            Endpoint.of_grpc(service)


@pytest.mark.parametrize(
    "address", ["", "nowhere", "h:80", "ftp://h:80", "http://", "http://h:port", "http://[::1"]
)
def test_what_answers_no_http_is_refused(address: str) -> None:
    for service in (address, Endpoint(address, "t")):
        with pytest.raises(InvalidInput, match=re.escape(f"service '{address}': expected http://HOST:PORT")):
            fetch_lag(service, "predictors")
        with pytest.raises(InvalidInput, match=re.escape(f"service '{address}': expected http://HOST:PORT")):
            Admin(service)


def test_a_token_is_shown_nowhere() -> None:
    endpoint = Endpoint("h:1", "hush")
    assert str(endpoint) == "h:1"
    assert "hush" not in repr(endpoint)


@pytest.mark.parametrize("token", ["hush\n", "hüsh", "hu\x00sh"])
def test_a_token_that_cannot_be_sent_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(InvalidInput, match="token: expected only printable ASCII characters") as refused:
        Endpoint("h:1", token)
    assert token not in str(refused.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidInput, match=f"timeout_seconds: {seconds}"):
        Endpoint("h:1", timeout_seconds=seconds)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lag", "c", "--service", "h:80"], "Error: service 'h:80': expected http://HOST:PORT"),
        (["tail", "c", "--service", "http://h:80"], "Error: service 'http://h:80': expected HOST:PORT, of gRPC"),
    ],
)
def test_the_command_line_refuses_what_is_no_endpoint(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert said in done.output
