"""How a replica has left, and what ends the stream of one whose name another has taken: pure decisions."""

import asyncio

import pytest

from deltasync.api.departure import StreamEnded, departure, superseded
from deltasync.core.errors import Contradiction, InvalidInput, Superseded
from deltasync.core.events import EventKind


@pytest.mark.parametrize(
    ("error", "goodbye", "instance", "replaced", "kind", "reason"),
    [
        (StreamEnded(), True, "a", False, EventKind.REPLICA_LEFT, "it has said goodbye"),
        (asyncio.CancelledError(), True, "a", False, EventKind.REPLICA_LEFT, "it has said goodbye"),
        (StreamEnded(), False, "", False, EventKind.REPLICA_LEFT, "its stream has ended"),
        (StreamEnded(), False, "a", False, EventKind.REPLICA_LOST, "its stream has ended without a goodbye"),
        (asyncio.CancelledError(), False, "a", False, EventKind.REPLICA_LOST, "its connection is lost"),
        (GeneratorExit(), False, "", False, EventKind.REPLICA_LOST, "its connection is lost"),
        (Superseded("newer"), False, "a", True, EventKind.REPLICA_REPLACED, "newer"),
        (StreamEnded(), False, "a", True, EventKind.REPLICA_REPLACED, "a newer stream has taken over"),
        (asyncio.CancelledError(), False, "", True, EventKind.REPLICA_REPLACED, "a newer stream has taken over"),
        (InvalidInput("acked"), False, "a", False, EventKind.REPLICA_LEFT, "acked"),
        (KeyError("x"), False, "a", False, EventKind.REPLICA_LEFT, "KeyError: 'x'"),
    ],
)
def test_who_leaves_is_told_apart(
    error: BaseException, goodbye: bool, instance: str, replaced: bool, kind: EventKind, reason: str
) -> None:
    found = departure(error, goodbye=goodbye, instance=instance, replaced=replaced)
    assert (found.kind, found.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("ours", "newer", "kind"),
    [
        ("a", "b", Contradiction),  # Two of one name.
        ("a", "a", Superseded),  # It has reconnected.
        ("", "b", Superseded),
        ("a", "", Superseded),
        ("", "", Superseded),
    ],
)
def test_only_another_of_its_name_has_to_stop(ours: str, newer: str, kind: type[Exception]) -> None:
    assert type(superseded("c", "r", ours, newer)) is kind
