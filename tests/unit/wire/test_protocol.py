"""The protocol's number: what is refused, and in which words."""

from pathlib import Path

import pytest

from deltasync.base.errors import InvalidInput
from deltasync.wire.errors import PROTOCOL, check_protocol, protocol_to_metadata

PAGE = Path(__file__).parents[3] / "protos" / "README.md"
KEY = "deltasync-protocol"


def test_a_call_that_names_no_protocol_is_of_the_first() -> None:
    check_protocol({"user-agent": "grpc"})


@pytest.mark.parametrize("said", ["", "two", "-2", "0", "1-2", " 1", "1\n", "+1", "1" * 5000, "\u0661"])
def test_what_is_no_number_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match=r"deltasync-protocol: .*, expected a number such as 1") as refused:
        check_protocol({KEY: said})
    assert len(str(refused.value)) < 200


def test_the_page_of_the_protocol_has_its_number() -> None:
    assert f"- Send `deltasync-protocol: {PROTOCOL}` with every call." in PAGE.read_text()
    assert ": ".join(protocol_to_metadata()) in PAGE.read_text()
