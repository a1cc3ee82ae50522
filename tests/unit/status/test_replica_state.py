"""What is wrong with a replica: in a word, and in a sentence."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.status.lag import replica_reason, replica_state
from deltasync.status.records import Lag, ReplicaStatus, RewindLag

LACKING = Lag(3, 20, 800, 7.5)
GOOD = ReplicaStatus(
    replica="p0",
    state="connected",
    since_seconds=0.0,
    connected=True,
    offset=9,
    lag=Lag(0, 20, 800, 7.5),
    seconds_since_ack=1.0,
    checked=True,
    damaged=[],
    unbound=[],
)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        (
            {"connected": False, "since_seconds": 3.0, "left": "its stream has ended"},
            "away for 3 s: its stream has ended",
        ),
        ({"connected": False, "since_seconds": 0.04}, "away for 40 ms: not seen since the service started"),
        ({"damaged": ["u", "v"]}, "rows differ from those sent to it, and the service sends them again: u, v"),
        (
            {"rewound": RewindLag(held=20, history="h", seconds=2.5)},
            "connected with 20 of a discarded history 2.5 s ago",
        ),
        ({"lag": LACKING, "behind": True}, "lacks 3 versions, last acknowledgement 1 s ago"),
        ({"lag": LACKING}, ""),
        ({"waits_for": "room on disk: it is full"}, "waits for room on disk: it is full"),
        ({"unbound": ["item"]}, "leaves out item"),
        ({"checked": False}, "its rows are not confirmed by checksums yet"),
        (
            {"lag": LACKING, "behind": True, "unacked": 12, "unacked_seconds": 25.0},
            "lacks 3 versions, last acknowledgement 1 s ago; has not acknowledged 12 releases sent "
            "25 s ago: it is slow to read or apply them",
        ),
        (
            {"lag": LACKING, "behind": True, "unacked": 1, "unacked_seconds": 0.3},
            "lacks 3 versions, last acknowledgement 1 s ago",
        ),
        (
            {"damages": 10, "damaged_seconds_ago": 3.0},
            "rows differed from those sent to it 10 times, last 3 s ago: another writer changes them",
        ),
        ({"damages": 10, "damaged_seconds_ago": 900.0}, ""),
        ({"damages": 1, "damaged_seconds_ago": 3.0}, ""),
        (
            {"checked": False, "damaged": ["u"]},
            "rows differ from those sent to it, and the service sends them again: u",
        ),
        (
            {"unbound": ["item"], "lag": LACKING, "behind": True},
            "lacks 3 versions, last acknowledgement 1 s ago; leaves out item",
        ),
    ],
)
def test_a_replica_says_all_that_is_wrong_with_it(changed: dict[str, Any], reason: str) -> None:
    assert replica_reason(replace(GOOD, **changed)) == reason


AWAY = {"connected": False, "since_seconds": 3.0, "left": "its stream has ended"}


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, "connected"),
        ({"checked": False}, "connected"),
        ({"lag": replace(LACKING, seconds=9.9), "behind": True}, "connected"),
        ({"lag": replace(LACKING, seconds=10.0), "behind": True}, "late"),
        ({"lag": replace(LACKING, seconds=10.0)}, "connected"),
        ({"unbound": ["item"]}, "partial"),
        ({"unbound": ["item"], "lag": replace(LACKING, seconds=10.0), "behind": True}, "late"),
        ({"waits_for": "room on disk: it is full"}, "waiting"),
        ({"rewound": RewindLag(held=20, history="h", seconds=2.5)}, "rewound"),
        ({"damaged": ["u"], "waits_for": "room on disk: it is full"}, "damaged"),
        ({"damages": 2, "damaged_seconds_ago": 599.0}, "damaged"),
        ({"damages": 2, "damaged_seconds_ago": 600.0}, "connected"),
        (AWAY, "away"),
        (AWAY | {"damaged": ["u"]}, "away"),
        (AWAY | {"guest": True}, "guest"),
    ],
)
def test_its_state_is_the_worst_of_what_is_wrong(changed: dict[str, Any], state: str) -> None:
    assert replica_state(replace(GOOD, **changed)) == state


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "connected": st.booleans(),
            "damaged": st.just(["u"]),
            "unbound": st.just(["u"]),
            "rewound": st.just(RewindLag(held=20, history="h", seconds=2.5)),
            "lag": st.builds(Lag, st.integers(1, 5), st.just(20), st.just(800), st.sampled_from([0.5, 60.0])),
            "behind": st.booleans(),
            "damages": st.integers(0, 3),
            "damaged_seconds_ago": st.sampled_from([1.0, 3600.0]),
            "waits_for": st.just("room on disk: it is full"),
            "guest": st.booleans(),
        },
    )
)
def test_of_one_that_somebody_should_know_of_there_is_a_reason(changed: dict[str, Any]) -> None:
    line = replace(GOOD, **changed)
    line = replace(line, state=replica_state(line), reason=replica_reason(line))
    if line.needs_attention:
        assert line.reason
    elif line.guest:
        assert not line.reason
