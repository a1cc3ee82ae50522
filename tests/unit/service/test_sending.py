"""Whether a replica still takes what it is sent."""

import pytest

from deltasync.api.sending import QUIET_SECONDS, Sending, may_go_on
from deltasync.feeds.frozen_release import FrozenRelease


@pytest.mark.parametrize(
    ("quiet", "sent_for", "yes", "said"),
    [
        (QUIET_SECONDS, None, True, "it takes what it is sent"),
        (QUIET_SECONDS + 1, None, False, "it has taken nothing of its release for 121 s"),
        (0.0, 700.0, False, "its release has been sent for 700 s, and others wait for the room of that"),
    ],
)
def test_who_may_go_on(quiet: float, sent_for: float | None, yes: bool, said: str) -> None:
    decision = may_go_on(quiet, sent_for)
    assert (decision.yes, decision.reason) == (yes, said)


def test_one_that_is_sent_nothing_may_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its target applies a release, say, or while nothing is new."""
    monkeypatch.setattr("deltasync.api.sending.QUIET_SECONDS", -1.0)
    sending = Sending()
    assert sending.decision.yes
    with sending.of(FrozenRelease(None)):
        assert not sending.decision.yes
    assert sending.decision.yes


def test_a_release_that_others_wait_for_is_given_up() -> None:
    sending, release = Sending(), FrozenRelease(None)
    with sending.of(release):
        assert sending.decision.yes
        release.wanted_back = True
        assert "others wait for the room" in sending.decision.reason
