"""Whether a replica still takes what it is sent."""

from deltasync.api.acks import Credit


def test_one_that_takes_nothing_of_a_release_is_given_up() -> None:
    patient, sending = Credit(1), Credit(1, quiet_seconds=-1.0)
    with patient.going_on(), sending.going_on():
        assert patient.decision.yes
        assert not sending.decision.yes
        assert sending.decision.reason == "it has received nothing of its release for 0 s"


def test_one_that_is_sent_nothing_may_be_quiet() -> None:
    """While its target applies a release, say, or while nothing is new."""
    sending = Credit(1, quiet_seconds=-1.0)
    sending.restart()
    assert sending.decision.yes
    with sending.going_on():
        assert not sending.decision.yes
    assert sending.decision.yes
