"""What a pause says, and what it makes of how far a replica is behind."""

from dataclasses import asdict, replace

import pytest

from deltasync.base.clock import Moment
from deltasync.base.errors import InvalidInput
from deltasync.consumers.consumer import ITSELF, Pause, Quarantine, extended, joined, pause_of_record

PAUSE = Pause(1_700_000_000 * 10**9, "anna@ops (127.0.0.1:4711)", "nonsense")


@pytest.mark.parametrize(
    ("next_sealed", "min_interval", "behind"),
    [
        (None, 0.0, 0),  # Nothing newer at all.
        (PAUSE.since_unix_ns + 5, 0.0, 0),  # What came after the pause began.
        (PAUSE.since_unix_ns - 7 * 10**9, 0.0, 7 * 10**9),
        (PAUSE.since_unix_ns - 7 * 10**9, 2.0, 5 * 10**9),  # The policy would have kept it back for so long.
        (PAUSE.since_unix_ns - 7 * 10**9, 60.0, 0),
    ],
)
def test_a_pause_stops_the_clock_of_replicas_that_are_behind(
    next_sealed: int | None, min_interval: float, behind: int
) -> None:
    assert PAUSE.behind_ns(None if next_sealed is None else Moment(next_sealed), min_interval) == behind


@pytest.mark.parametrize("set_seconds", [-3600, 0, 3600])
def test_a_clock_that_is_set_before_a_pause_makes_nobody_older(set_seconds: int) -> None:
    """Sealed 7 s before, by a clock that was then set."""
    sealed = Moment(PAUSE.since_unix_ns - (7 + set_seconds) * 10**9, steady_ns=5 * 10**9)
    assert replace(PAUSE, since_ns=12 * 10**9).behind_ns(sealed, 0.0) == 7 * 10**9


def test_a_pause_comes_back_as_it_was_written_down() -> None:
    assert pause_of_record(None) is None
    for pause in (PAUSE, replace(PAUSE, quarantine=Quarantine(2, 9, 3, "row 7 has norm 1e6"))):
        assert pause_of_record(asdict(replace(pause, since_ns=7))) == pause


def test_it_says_since_when_by_whom_and_why() -> None:
    assert PAUSE.description == "paused since 2023-11-14T22:13:20Z by anna@ops (127.0.0.1:4711): nonsense"


@pytest.mark.parametrize("reason", ["x" * 401, "two\nlines", "\x1b[2J"])
def test_a_reason_is_one_line_of_bounded_length(reason: str) -> None:
    with pytest.raises(InvalidInput, match="reason: use at most 400 printable"):
        Pause(0, "anna", reason)


def test_a_pause_goes_on_and_its_reason_is_kept_whoever_pauses_again() -> None:
    later = Pause(PAUSE.since_unix_ns + 1, "bert")
    assert joined(None, PAUSE) == PAUSE
    assert joined(PAUSE, later) == PAUSE  # No reason takes none away.
    assert joined(PAUSE, replace(later, reason="nonsense")) == PAUSE
    assert joined(PAUSE, replace(later, reason="norms")) == replace(PAUSE, reason="norms; nonsense")
    assert joined(Pause(1, "anna"), replace(later, reason="norms")) == Pause(1, "anna", "norms")
    assert len(joined(PAUSE, replace(later, reason="x" * 400)).reason) == 400


def test_a_quarantine_names_its_first_and_newest_version() -> None:
    quarantine = extended(None, 2, "row 7 has norm 1e6")
    assert quarantine.description == "version 2 is in quarantine: row 7 has norm 1e6"
    assert extended(quarantine, 2, "it is sealed at a second try") == quarantine
    for version in range(5, 100_000, 5):
        quarantine = extended(quarantine, version, "another row has norm 1e9")
    assert quarantine.description == "20000 versions from 2 to 99995 are in quarantine: row 7 has norm 1e6"
    assert len(extended(None, 1, "x" * 500).description) <= 400


def test_a_later_quarantine_replaces_it_and_keeps_other_reasons() -> None:
    first = extended(None, 2, "row 7 has norm 1e6")
    held = joined(PAUSE, Pause(PAUSE.since_unix_ns + 1, ITSELF, quarantine=first))
    assert (held.since_unix_ns, held.by) == (PAUSE.since_unix_ns, PAUSE.by)
    assert held.why == "version 2 is in quarantine: row 7 has norm 1e6; nonsense"
    held = joined(held, Pause(PAUSE.since_unix_ns + 2, ITSELF, quarantine=extended(first, 3, "row 8")))
    assert held.why == "2 versions from 2 to 3 are in quarantine: row 7 has norm 1e6; nonsense"
    assert joined(held, Pause(PAUSE.since_unix_ns + 3, "bert", "norms")).quarantine == held.quarantine
    long = replace(held, reason="x" * 400)
    assert len(long.why) == 400
    Pause(long.since_unix_ns, long.by, long.why)  # As a client takes it from an answer.
