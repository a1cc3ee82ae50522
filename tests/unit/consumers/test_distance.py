"""When a consumer that follows another one at a distance goes on to a later version."""

from collections.abc import Sequence

import pytest
from tests.support.seals import sealed

from deltasync.base.errors import InvalidInput
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.consumers.follow import BACK, STAY, Distance, Follow, Objection, next_version
from deltasync.consumers.serving_history import HistoryLine, proven_since

SECOND = 10**9
KEPT = [
    KeptVersion(model="m", name="", id=f"{each}", seal=sealed(each), bytes=1, kept_unix_ns=0, by="")
    for each in (10, 20, 30)
]


def lines(*versions: Sequence[int]) -> list[HistoryLine]:
    """A line each second; each has the versions of the replicas."""
    return [
        HistoryLine(unix_ns=at * SECOND, replicas={str(name): each for name, each in enumerate(some)})
        for at, some in enumerate(versions, 1)
    ]


def step(
    history: list[HistoryLine],
    now: float,
    *,
    behind: float = 2.0,
    at: int = 0,
    before: int | None = None,
    objection: Objection | None = None,
    on_objection: str = STAY,
) -> tuple[int | None, str]:
    distance = Distance("canary", behind, on_objection, None if before is None else KEPT[before])
    follows = Follow(KEPT[at], 0, "me", distance)
    kept, why = next_version(follows, distance, KEPT, history, objection, int(now * SECOND))
    return kept.version if kept else None, why


def test_a_version_counts_from_when_the_last_replica_has_proven_it_without_a_break() -> None:
    assert proven_since(lines([20, 10], [20, 20], [25, 21]), 20) == 2 * SECOND
    assert proven_since(lines([20, 20], [20, 0], [20, 20]), 20) == 3 * SECOND
    assert proven_since(lines([20, 20], [19, 20]), 20) is None
    assert proven_since(lines([20, 20], []), 20) is None, "no replica is left to prove it"
    assert proven_since([], 20) is None
    early, late = lines([20]), [HistoryLine(unix_ns=at * SECOND, replicas={"0": 20}) for at in (121, 122)]
    assert proven_since(early + late, 20) == SECOND
    later = [HistoryLine(unix_ns=at * SECOND, replicas={"0": 20}) for at in (122, 123)]
    assert proven_since(early + later, 20) == 122 * SECOND, "the service was away"


def test_it_goes_on_to_the_newest_version_that_was_proven_for_long_enough() -> None:
    history = lines([20], [20], [30])
    version, why = step(history, 2.5)
    assert version is None
    assert why == "consumer 'canary' has proven version 20 since 1970-01-01T00:00:01Z, 0.5 s to go"
    assert step(history, 3.0)[0] == 20
    assert step(history, 5.0)[0] == 30, "it skips 20"
    assert step(history, 5.0, at=2) == (None, "no later version is kept")
    assert step(history, 500.0)[0] is None, "the service was away, and has just started"
    assert step(lines([15]), 9.0) == (None, "consumer 'canary' has proven no later kept version, behind are 0")


def test_an_objection_stops_it_and_its_time_begins_again_afterwards() -> None:
    history = lines([20], [20], [20])
    objection = Objection(2 * SECOND, "monitor", "AUC fell")
    version, why = step(history, 9.0, objection=objection)
    assert version is None
    assert why == ("stays, because consumer 'canary' objects since 1970-01-01T00:00:02Z by monitor: AUC fell")
    withdrawn = Objection(2 * SECOND, "monitor", "AUC fell", 4 * SECOND)
    assert step(history, 5.9, objection=withdrawn)[0] is None
    assert step(history, 6.0, objection=withdrawn)[0] == 20


def test_after_an_objection_it_goes_on_only_to_what_the_other_one_has_served_since() -> None:
    history = lines([20], [25], [25], [30])
    withdrawn = Objection(1 * SECOND, "monitor", "AUC fell", 2 * SECOND, 25)
    version, why = step(history, 5.5, objection=withdrawn)
    assert version is None, "nobody has served version 20 without an objection"
    assert "has proven version 30 since 1970-01-01T00:00:04Z, 0.5 s to go" in why
    assert step(history, 6.0, objection=withdrawn)[0] == 30


def test_it_goes_back_once_on_an_objection_if_asked_to() -> None:
    objection = Objection(2 * SECOND, "monitor", "AUC fell")
    assert step([], 9.0, at=1, before=0, objection=objection)[0] is None
    version, why = step([], 9.0, at=1, before=0, objection=objection, on_objection=BACK)
    assert version == 10
    assert "goes back, because consumer 'canary' objects" in why
    follows = Follow(KEPT[1], 0, "me", Distance("canary", 2.0, BACK, KEPT[0]))
    assert follows.ids == {"10", "20"}
    back = follows.gone_on(KEPT[0], 9, "itself")
    assert back.distance == Distance("canary", 2.0, BACK)
    assert back.gone_on(KEPT[2], 9, "itself").distance == Distance("canary", 2.0, BACK, KEPT[0])


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="behind_seconds: -1"):
        Distance("canary", -1)
    with pytest.raises(InvalidInput, match="on_objection: 'away', expected stay or back"):
        Distance("canary", 1, "away")
    for reason in ("", "a\nb", "x" * 401):
        with pytest.raises(InvalidInput, match="reason: use 1 to 400"):
            Objection(1, "me", reason)
