"""How far something has come, in the log."""

import logging

import pytest

from deltasync.core.progress import Progress, under_way


def test_what_takes_long_is_told_now_and_then_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    monkeypatch.setattr("deltasync.core.progress.time.monotonic", lambda: now[0])
    progress = Progress("comparing table 'user'", 9)
    for rows, seconds in ((1, 4.9), (2, 5.0), (3, 9.9), (4, 10.0), (9, 10.1)):
        now[0] = seconds
        progress.at(rows)
    assert caplog.messages == [f"comparing table 'user': {rows} of 9 rows" for rows in (2, 4, 9)]


def test_what_is_quick_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Progress("comparing table 'user'", 9).at(9)
    assert not caplog.messages


def test_it_need_not_be_rows(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("deltasync.core.progress._EVERY_SECONDS", 0.0)
    Progress("compiling", 9, "kernels").add(4)
    assert caplog.messages == ["compiling: 4 of 9 kernels"]


def test_what_takes_long_is_under_way_until_it_is_through_or_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("deltasync.core.progress.time.monotonic", lambda: now[0])
    progress, other = Progress("b", 9), Progress("a", 3, "bytes")
    progress.at(8)
    now[0] = 0.9
    assert under_way() == []
    now[0] = 1.0
    assert under_way() == ["a: 0 of 3 bytes", "b: 8 of 9 rows"]
    progress.add(1)
    assert under_way() == ["a: 0 of 3 bytes"]
    del other
    assert under_way() == []
