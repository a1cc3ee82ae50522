"""Whether a replica still takes what it is sent."""

import pytest

from deltasync.api.acks import Credit


def test_one_that_takes_nothing_of_a_release_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Credit(1)
    with sending.going_on():
        assert sending.decision.yes
        monkeypatch.setattr("deltasync.api.acks.QUIET_SECONDS", -1.0)
        assert not sending.decision.yes
        assert sending.decision.reason == "it has received nothing of its release for 0 s"


def test_one_that_is_sent_nothing_may_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its target applies a release, say, or while nothing is new."""
    monkeypatch.setattr("deltasync.api.acks.QUIET_SECONDS", -1.0)
    sending = Credit(1)
    sending.note_moved()
    assert sending.decision.yes
    with sending.going_on():
        assert not sending.decision.yes
    assert sending.decision.yes
