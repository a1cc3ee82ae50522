"""What a client says of its connection and of what fails there, and how often the log does."""

import logging
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.client import NumpyTarget, Publisher, PublisherOptions, Subscriber, SubscriberOptions
from deltasync.client.connection import Connectivity, should_log
from deltasync.client.endpoint import meaning


class Clock:
    """Time as a test has it."""

    seconds = 1_000.0

    def __call__(self) -> int:
        return round(self.seconds * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def failed(
    link: Connectivity, clock: Clock, text: str = "nobody there", *, times: int = 1, pause: float = 5
) -> None:
    for _ in range(times):
        link.note_failed(ServiceUnavailable(text), pause)
        clock.seconds += pause


def test_it_says_since_when_and_why(clock: Clock) -> None:
    link = Connectivity("rank 0", clock)
    assert str(link.now) == "not connected for 0.0 s, 0 attempts failed"
    failed(link, clock, times=3, pause=2)
    assert (link.now.connected, link.now.attempts, link.now.last_error) == (False, 3, "nobody there")
    assert str(link.now) == "not connected for 6.0 s, 3 attempts failed, last error: nobody there"
    link.note_connected()
    clock.seconds += 4
    link.note_connected()
    assert (str(link.now), link.now.attempts) == ("connected for 4.0 s", 0)
    link.note_lost(ServiceUnavailable("gone"))
    clock.seconds += 1
    assert str(link.now) == "not connected for 1.0 s, 0 attempts failed, last error: gone"
    failed(link, clock, pause=1)
    assert (link.now.seconds, link.now.attempts) == (2, 1)


def test_an_hour_without_a_service_has_few_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    link = Connectivity("rank 0", clock)
    failed(link, clock, times=720)
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 6
    assert lines[0].startswith("rank 0 has been disconnected for 0.0 s, 1 attempt failed, next attempt in 5.00")
    assert "for 3000.0 s, 601 attempts" in lines[-1]
    link.note_connected()
    assert caplog.records[-1].getMessage() == "rank 0 is connected again, after 3600.0 s and 720 failed attempts"


@pytest.mark.parametrize("errors", [1, 2])
def test_one_that_comes_and_goes_has_few_lines(
    clock: Clock, caplog: pytest.LogCaptureFixture, errors: int
) -> None:
    caplog.set_level(logging.INFO)
    link = Connectivity("rank 0", clock)
    for number in range(3_600):
        link.note_connected()
        failed(link, clock, f"error {number % errors}", pause=1)
    assert len(caplog.records) <= 2 * 3_600 / (60 if errors == 1 else 10)


@given(st.floats(0, 1e6), st.booleans(), st.booleans())
def test_what_is_new_is_said_no_later(silent: float, new_error: bool, new_outage: bool) -> None:
    said = should_log(silent, new_error=new_error, new_outage=new_outage).yes
    assert said or silent < 600
    assert not said or silent >= 10
    assert should_log(silent, new_error=True, new_outage=new_outage).yes >= said


ENDED = "Server disconnected without sending a response"
CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"


@pytest.mark.parametrize(
    ("details", "tls", "certificate", "said"),
    [
        (CLOSED, False, False, "this port may need TLS"),
        (CLOSED, True, False, "it may need a client certificate"),
        (CLOSED, True, True, "it may refuse this client's certificate"),
        ("Socket closed", True, True, ""),
        (ENDED, False, False, "the service ended before it answered, or this port may need TLS"),
        (ENDED, True, True, "the service ended before it answered, or it may refuse this client's certificate"),
        (ENDED, True, False, "the service ended before it answered, or it may need a client certificate"),
        (
            "failed to connect to all addresses; last error: Connection refused",
            True,
            True,
            "nothing listens there",
        ),
        ("[Errno 111] Connection refused", False, False, "nothing listens there"),
        ("[Errno -3] Temporary failure in name resolution", False, False, "is its host name right"),
        ("[Errno -2] Name or service not known", False, False, "is its host name right"),
        (
            "errors resolving a:1: address lookup failed for a:1: Domain name not found",
            False,
            False,
            "is its host name",
        ),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", True, True, "it may refuse this client's"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", True, False, "has expired"),
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate", True, False, "set ca to the file"),
    ],
)
def test_what_is_known_is_said(details: str, tls: bool, certificate: bool, said: str) -> None:
    found = meaning(details, tls=tls, certificate=certificate)
    assert found.startswith(said) or said in found
    assert bool(found) == bool(said)


def test_a_process_that_gevent_has_patched_without_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    said = r"gevent has patched .*: call grpc\.experimental\.gevent\.init_gevent\(\) after monkey\.patch_all"
    with pytest.raises(InvalidInput, match=said):
        Subscriber(SubscriberOptions(service="127.0.0.1:1", consumer="predictors"), NumpyTarget())
    options = PublisherOptions(service="127.0.0.1:1", model="clicks", run="r", run_started_unix_ns=1)
    with pytest.raises(InvalidInput, match=said):
        Publisher(options, [], [])
    patched.is_module_patched = lambda _: False
    with Publisher(options, [], []) as publisher:
        assert not publisher.connection.connected
