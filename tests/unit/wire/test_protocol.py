"""Versions of the protocol: who understands whom, and how it is said."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.errors import InvalidInput
from deltasync.wire.protocol import (
    OLDEST_PROTOCOL,
    OURS,
    PROTOCOL,
    Protocols,
    agree,
    protocols_from_metadata,
    protocols_to_metadata,
)

PAGE = Path(__file__).parents[3] / "protos" / "README.md"

ranges = st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda pair: Protocols(min(pair), max(pair)))


@given(ranges, ranges)
def test_two_sides_agree_if_there_is_a_version_that_both_understand(client: Protocols, service: Protocols) -> None:
    common = set(range(client.oldest, client.newest + 1)) & set(range(service.oldest, service.newest + 1))
    agreed = agree(client, service)
    assert agreed.yes == bool(common)
    assert f"the client speaks {client}, the service {service}" in agreed.reason
    if not common:
        older = "service" if service.newest < client.oldest else "client"
        assert agreed.reason.endswith(f": update the {older}")


def test_a_refusal_names_both_and_who_is_to_be_updated() -> None:
    newer = agree(Protocols(4, 5), Protocols(1, 2))
    assert newer.reason == "the client speaks protocols 4 to 5, the service protocols 1 to 2: update the service"
    older = agree(Protocols(1, 1), Protocols(3, 3))
    assert older.reason == "the client speaks protocol 1, the service protocol 3: update the client"


def test_one_version_apart_is_understood_both_ways() -> None:
    assert OLDEST_PROTOCOL < PROTOCOL
    before, after = Protocols(PROTOCOL - 1, PROTOCOL - 1), Protocols(PROTOCOL, PROTOCOL + 1)
    for other in (before, after):
        assert agree(other, OURS).yes
        assert agree(OURS, other).yes


def test_the_page_of_the_protocol_has_its_number() -> None:
    assert f"This page describes protocol {PROTOCOL}." in PAGE.read_text()
    assert ": ".join(protocols_to_metadata(OURS)) in PAGE.read_text()


def test_a_client_that_says_nothing_speaks_the_first_version() -> None:
    assert protocols_from_metadata({"user-agent": "grpc"}) == Protocols(1, 1)


@given(ranges)
def test_what_is_said_is_understood(protocols: Protocols) -> None:
    assert protocols_from_metadata(dict([protocols_to_metadata(protocols)])) == protocols


@pytest.mark.parametrize(
    "said",
    ["", "2", "2-", "-2", "2-1", "0-2", "1-2-3", "1 - 2", "1-2\n", "+1-2", "1-" + "9" * 5000, "\u0661-\u0662"],
)
def test_what_is_no_range_of_versions_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match=r"deltasync-protocol: .*, expected OLDEST-NEWEST") as refused:
        protocols_from_metadata({"deltasync-protocol": said})
    assert len(str(refused.value)) < 200
