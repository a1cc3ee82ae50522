"""When a consumer that follows another one at a distance goes on to a later version."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.support.seals import sealed

from deltasync.base.errors import InvalidInput
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.consumers.follow import (
    BACK,
    STAY,
    Follow,
    HistoryLine,
    Objection,
    RolloutDelay,
    next_version,
    seconds_since_held,
)

SECOND = 10**9
KEPT = [
    KeptVersion(
        model="m",
        name="",
        id=f"{each}",
        seal=replace(sealed(each), checksum=each),
        bytes=1,
        kept_unix_ns=0,
        by="",
    )
    for each in (10, 20, 30)
]


def lines(*held: Sequence[int] | None, fleet: str = "f", objections: int = 0, first: int = 1) -> list[HistoryLine]:
    """A line each second; each has the versions that all replicas hold, or None if no replica is connected."""
    return [
        HistoryLine(
            unix_ns=0,  # Labels count for nothing.
            watched_ns=at * SECOND,
            after_ns=(at - 1) * SECOND,
            replicas={"r": max(some or [0])},
            fleet=() if some is None else tuple(fleet),
            held=tuple(some or ()),
            objections=objections,
        )
        for at, some in enumerate(held, first)
    ]


def step(
    history: list[HistoryLine],
    *,
    behind: float = 2.0,
    at: int = 0,
    before: int | None = None,
    objection: Objection | None = None,
    on_objection: str = STAY,
) -> tuple[int | None, str]:
    distance = RolloutDelay("canary", behind, on_objection, None if before is None else KEPT[before])
    follows = Follow(KEPT[at], 0, "me", distance)
    kept, why = next_version(follows, distance, KEPT, history, objection)
    return kept.version if kept else None, why


def test_time_counts_from_when_all_replicas_held_a_version_exactly() -> None:
    assert seconds_since_held(lines([20], [21], [25]), 0) == {20: 2.0, 21: 1.0, 25: 0.0}
    assert seconds_since_held([], 0) == {}
    assert seconds_since_held(lines([20], None), 0) == {}, "no replica is connected"


def test_time_counts_while_all_processes_that_held_it_are_connected() -> None:
    away = [*lines([20], [21]), *lines(None, first=3), *lines([21], [21], first=4)]
    assert seconds_since_held(away, 0)[20] == 2.0, "the time before and after, without that between"
    another = [*lines([20], [21]), *lines([21], [21], fleet="g", first=3)]
    assert seconds_since_held(another, 0) == {21: 1.0}, "a replica was lost, or another one joined"
    alone = [*lines([20], [20], fleet="fg"), *lines([21], fleet="f", first=3), *lines([21], fleet="fg", first=4)]
    assert seconds_since_held(alone, 0)[20] == 1.0, "one was away for a while"
    joined = [*lines([20], [20]), *lines([20], fleet="fg", first=3), *lines([20], [20], first=4)]
    assert seconds_since_held(joined, 0) == {20: 1.0}, "another one joined, and was lost"


def test_time_without_lines_does_not_count() -> None:
    restarted = [
        *lines([20], [20]),
        replace(lines([20], first=2)[0], watched_ns=2 * SECOND + 1, after_ns=2 * SECOND),
    ]
    assert seconds_since_held(restarted, 0)[20] == pytest.approx(1.0), "the service was away"
    missing = [lines([20])[0], lines([20], first=9)[0]]
    assert seconds_since_held(missing, 0) == {20: 0.0}, "a line between could not be written"


def test_it_goes_on_to_the_newest_version_that_was_held_for_long_enough() -> None:
    version, why = step(lines([20], [25]))
    assert version is None
    assert why == "consumer 'canary' holds or has held version 20, 1 s to go"
    version, why = step(lines([20], [25], [25]))
    assert (version, why) == (20, "consumer 'canary' has gone on for 2 s since it held version 20")
    assert step(lines([20], [25], [30]))[0] == 20
    assert step(lines([20], [20], [30], [31], [32]))[0] == 30, "it skips 20"
    assert step(lines([30]), at=2) == (None, "no later version is kept")
    assert step(lines([20], None)) == (None, "consumer 'canary' has no connected replica")
    assert step([]) == (None, "consumer 'canary' has no connected replica")


def test_a_version_that_the_other_one_skipped_is_passed_over() -> None:
    version, why = step(lines([15], [25], [25], [25]))
    assert version is None
    assert why == "not all replicas of consumer 'canary' have held a later kept version"
    assert step(lines([15]))[1].endswith(", behind are r")


def test_an_objection_stops_it_and_takes_out_what_was_kept_before_its_end() -> None:
    objection = Objection(1, "monitor", "AUC fell")
    version, why = step(lines([20], [20], [20]), objection=objection)
    assert version is None
    assert why == "stays, because consumer 'canary' objects since 1970-01-01T00:00:00Z by monitor: AUC fell"
    withdrawn = replace(objection, until_unix_ns=2, until_id="20")
    after = lines([20], [20], [20], [25], [25], objections=1)
    assert (
        step(after, objection=withdrawn)[1]
        == "not all replicas of consumer 'canary' have held a later kept version, behind are r"
    )
    assert step(lines([20], [30], [30], objections=1), objection=withdrawn)[0] is None
    assert step(lines([20], [30], [30], [30], objections=1), objection=withdrawn)[0] == 30
    everything = replace(withdrawn, until_id="30")
    text = "no version has been kept since consumer 'canary' withdrew its objection"
    assert step(after, objection=everything) == (None, text)


def test_time_begins_anew_after_an_objection() -> None:
    withdrawn = Objection(1, "monitor", "AUC fell", 1, 2)
    history = [*lines([30], [30]), *lines([30], [30], objections=1, first=3)]
    version, why = step(history, objection=withdrawn)
    assert version is None
    assert why == "consumer 'canary' holds or has held version 30, 1 s to go"
    assert step([*history, *lines([30], objections=1, first=5)], objection=withdrawn)[0] == 30
    assert step(history[:2], objection=withdrawn)[0] is None, "no line was written since"


def test_it_goes_back_once_on_an_objection_if_asked_to() -> None:
    objection = Objection(2 * SECOND, "monitor", "AUC fell")
    assert step([], at=1, before=0, objection=objection)[0] is None
    version, why = step([], at=1, before=0, objection=objection, on_objection=BACK)
    assert version == 10
    assert "goes back, because consumer 'canary' objects" in why
    follows = Follow(KEPT[1], 0, "me", RolloutDelay("canary", 2.0, BACK, KEPT[0]))
    assert {each.id for each in follows.versions} == {"10", "20"}
    back = follows.gone_on(KEPT[0], 9, "itself")
    assert back.distance == RolloutDelay("canary", 2.0, BACK)
    assert back.gone_on(KEPT[2], 9, "itself").distance == RolloutDelay("canary", 2.0, BACK, KEPT[0])


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="behind_seconds: -1"):
        RolloutDelay("canary", -1)
    with pytest.raises(InvalidInput, match="on_objection: 'away', expected stay or back"):
        RolloutDelay("canary", 1, "away")
    for reason in ("", "a\nb", "x" * 401):
        with pytest.raises(InvalidInput, match="reason: use 1 to 400"):
            Objection(1, "me", reason)
