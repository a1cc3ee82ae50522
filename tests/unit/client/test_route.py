"""Which process a client asks next: every one in turn, or the owner that one has named, but nobody for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import Contradiction, DeltasyncError, InvalidInput, NotOwner, ServiceUnavailable
from deltasync.core.owner import Owner

ALL = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


def route(addresses: list[str] = ALL, **settings: str) -> Route:
    return Route(Endpoint.of_grpc(Endpoint(",".join(addresses), **settings)))  # type: ignore[arg-type]


def named(grpc: str) -> NotOwner:
    return NotOwner("another has it", owner=Owner("p", grpc, "http://127.0.0.1:9"))


def test_each_is_asked_once_before_a_pause() -> None:
    one = route()
    asked = [one.endpoint.address]
    while one.turn(ServiceUnavailable("gone")):
        asked.append(one.endpoint.address)
    assert sorted(asked) == ALL
    assert one.endpoint.address == asked[0]


def test_one_alone_is_asked_again_after_a_pause() -> None:
    one = route(ALL[:1])
    assert not one.turn(ServiceUnavailable("gone"))
    assert one.endpoint.address == ALL[0]


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


def test_a_token_does_not_go_to_another_machine_over_plain_text() -> None:
    one = route(token="secret")  # noqa: S106
    one.turn(named("elsewhere.example:7"))
    assert one.endpoint.address in ALL


def test_an_address_that_is_none_is_not_followed() -> None:
    one = route()
    one.turn(named("no address"))
    assert one.endpoint.address in ALL


def test_several_addresses_of_http_are_asked_likewise() -> None:
    one = Route(Endpoint.of_http("http://127.0.0.1:1,http://127.0.0.1:2"))
    assert one.turn(named("127.0.0.1:7"))
    assert one.endpoint.address == "http://127.0.0.1:9"


@pytest.mark.parametrize("address", ["127.0.0.1:1,127.0.0.1", "127.0.0.1:1,", "http://a:1,b:2"])
def test_every_address_has_to_be_one(address: str) -> None:
    with pytest.raises(InvalidInput, match="expected HOST:PORT"):
        Endpoint.of_grpc(address)


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
