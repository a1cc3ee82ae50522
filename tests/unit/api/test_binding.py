"""Addresses as gRPC and URLs write them."""

import pytest

from deltasync.api.binding import with_port


@pytest.mark.parametrize(
    ("host", "said"), [("127.0.0.1", "127.0.0.1:80"), ("localhost", "localhost:80"), ("::1", "[::1]:80")]
)
def test_an_address_of_ipv6_is_in_brackets(host: str, said: str) -> None:
    assert with_port(host, 80) == said
