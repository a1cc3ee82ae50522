"""Addresses are read by one function, which says what is wrong with one that nobody could reach."""

import pytest

from deltasync.base.addresses import host_and_port, is_url, listening_host, with_port
from deltasync.base.errors import InvalidInput


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("localhost:50051", "localhost", 50051),
        (" localhost:50051\n", "localhost", 50051),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("sync_service.prod.svc.cluster.local:80", "sync_service.prod.svc.cluster.local", 80),
        ("host.:80", "host.", 80),
    ],
)
def test_what_an_address_says(address: str, host: str, port: int) -> None:
    assert host_and_port(address) == (host, port)
    assert host_and_port(with_port(host, port)) == (host, port)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "such as localhost:50051"),
        ("localhost", "such as localhost:50051"),
        (":50051", "such as localhost:50051"),
        ("grpc://localhost:50051", "without grpc://"),
        ("localhost:0", "a port from 1 to 65535"),
        ("localhost:99999", "a port from 1 to 65535"),
        ("localhost:" + "9" * 5000, "a port from 1 to 65535"),
        ("localhost:-1", "a port from 1 to 65535"),
        ("localhost:port", "a port from 1 to 65535"),
        ("localhost:\u0661", "a port from 1 to 65535"),
        ("::1:50051", "IPv6 in brackets"),
        ("[localhost]:50051", "neither a name nor an IP address"),
        ("[::1:50051", "neither a name nor an IP address"),
        ("local host:50051", "neither a name nor an IP address"),
        ("a/b:50051", "neither a name nor an IP address"),
        ("user@host:50051", "neither a name nor an IP address"),
    ],
)
def test_what_is_no_address_is_refused_with_what_it_should_be(address: str, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        host_and_port(address)
    assert "expected HOST:PORT" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8080", True),
        ("https://[::1]:8080/", True),
        ("https://service", True),
        ("localhost:8080", False),
        ("http://localhost:0", False),
        ("http://localhost:99999", False),
        ("http://user:secret@localhost:8080", False),
        ("http://[::1", False),
        ("grpc://localhost:1", False),
    ],
)
def test_which_addresses_are_of_http(url: str, expected: bool) -> None:
    assert is_url(url) is expected


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", "127.0.0.1"), ("[::1]", "::1"), ("::", "::"), (" 10.0.0.1", "10.0.0.1")]
)
def test_all_servers_listen_on_the_same_host(host: str, expected: str) -> None:
    assert listening_host(host) == expected
