"""The origins that browsers make of addresses."""

import pytest

from deltasync.api.application import origin_of


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
