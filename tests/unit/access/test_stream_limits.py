"""How many streams a peer may have, and how often it may open one."""

from contextlib import ExitStack, suppress

import pytest

from deltasync.access.limits import LimitOptions, Limits, StreamLimits, peer_of
from deltasync.access.roles import Identity
from deltasync.base.errors import LimitReached


def limited(**limits: int) -> tuple[StreamLimits, list[float]]:
    """Streams with limits, and the time, which stands still."""
    now = [0.0]
    return StreamLimits(Limits(LimitOptions(**limits)), lambda: now[0]), now


def test_a_peer_has_so_many_streams_and_all_have_so_many() -> None:
    streams, _ = limited(streams=3, streams_per_peer=2)
    with streams.taking("one"), streams.taking("one"):
        with pytest.raises(LimitReached, match=r"limit streams_per_peer"), streams.taking("one"):
            pass
        with streams.taking("two"), pytest.raises(LimitReached, match=r"limit streams\)"), streams.taking("two"):
            pass
    with streams.taking("one"), streams.taking("one"), streams.taking("two"):
        pass


def test_peers_without_a_role_leave_streams_to_the_others() -> None:
    streams, _ = limited(streams=2, streams_without_role=1)
    with streams.taking("one", without_role=True):
        refused = pytest.raises(LimitReached, match=r"limit streams_without_role\)")
        with refused, streams.taking("two", without_role=True):
            pass
        with streams.taking("three"):
            pass
    with streams.taking("two", without_role=True):
        pass


@pytest.mark.parametrize("limit", ["opens_per_second", "opens_per_second_per_peer"])
def test_a_peer_that_opens_too_fast_waits(limit: str) -> None:
    streams, now = limited(**{limit: 2})
    for moment in (0.0, 1.0):
        now[0] = moment
        for _ in range(2):
            with streams.taking("one"):
                pass
        with pytest.raises(LimitReached, match=rf"at most 2 are allowed \(limit {limit}\)"), streams.taking("one"):
            pass


def test_one_peer_does_not_keep_the_others_out() -> None:
    streams, _ = limited(opens_per_second_per_peer=1, streams_per_peer=1)
    with ExitStack() as stack:
        for number in range(10):
            stack.enter_context(streams.taking(f"peer {number}"))


def test_a_peer_that_is_refused_takes_no_opens_of_the_others() -> None:
    streams, _ = limited(opens_per_second=4, opens_per_second_per_peer=2)
    for number in range(20):
        with suppress(LimitReached), streams.taking("one"):
            assert number < 2
    with streams.taking("two"):
        pass


def test_peers_that_have_gone_are_forgotten() -> None:
    streams, now = limited(opens_per_second=5)
    for number in range(3000):
        now[0] += 0.5
        with streams.taking(f"peer {number}"):
            pass
    assert len(streams._opens) <= 1001
    assert not streams._streams


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.7:4711", "10.0.0.7:4712", True),
        ("10.0.0.7:4711", "10.0.0.8:4711", False),
        ("[2001:db8::1]:4711", "[2001:db8::ffff:1]:4712", True),
        ("[2001:db8::1]:4711", "[2001:db8:0:1::1]:4711", False),
        ("[::ffff:10.0.0.7]:4711", "[::ffff:10.0.0.8]:4711", False),
        ("[::ffff:10.0.0.7]:4711", "10.0.0.7:1", True),
        ("[fe80::1%eth0]:1", "[fe80::2%eth0]:2", True),
        ("unix:", "unix:", True),
        ("", "", True),
    ],
)
def test_a_peer_is_an_address_whatever_its_port(one: str, other: str, same: bool) -> None:
    assert (peer_of(Identity(address=one)) == peer_of(Identity(address=other))) is same


def test_names_at_one_address_are_peers_of_their_own() -> None:
    assert peer_of(Identity("anna", address="10.0.0.7:1")) != peer_of(Identity("bert", address="10.0.0.7:2"))
