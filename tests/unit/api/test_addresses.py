"""Addresses as gRPC and URLs write them, and the origins that browsers make of them."""

import pytest

from deltasync.api.binding import with_port
from deltasync.api.origins import origin_of


@pytest.mark.parametrize(
    ("http", "origin"),
    [
        ("http://sync-0:8080", "http://sync-0:8080"),
        ("https://Sync.example:443/", "https://sync.example"),
        ("http://sync:80", "http://sync"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        *(
            (text, "")
            for text in ("", "sync:8080", "ftp://sync", "http://a b", "http://a;b", "http://*", "http://x:y")
        ),
    ],
)
def test_an_address_has_the_origin_that_browsers_give_it(http: str, origin: str) -> None:
    assert origin_of(http) == origin


@pytest.mark.parametrize(
    ("host", "said"), [("127.0.0.1", "127.0.0.1:80"), ("localhost", "localhost:80"), ("::1", "[::1]:80")]
)
def test_an_address_of_ipv6_is_in_brackets(host: str, said: str) -> None:
    assert with_port(host, 80) == said
