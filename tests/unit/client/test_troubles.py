"""What is said of connections that fail: in the words of gRPC and OpenSSL, which tests over sockets show too."""

import pytest

from deltasync.client.troubles import meaning

CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"


@pytest.mark.parametrize(
    ("details", "tls", "certificate", "said"),
    [
        (CLOSED, False, False, "it may speak TLS there"),
        (CLOSED, True, False, "it may want a certificate of this client"),
        (CLOSED, True, True, "it may refuse this client's certificate"),
        ("Socket closed", True, True, ""),
        (
            "failed to connect to all addresses; last error: Connection refused",
            True,
            True,
            "nothing listens there",
        ),
        ("[Errno 111] Connection refused", False, False, "nothing listens there"),
        ("[Errno -3] Temporary failure in name resolution", False, False, "is the name of its host right"),
        ("[Errno -2] Name or service not known", False, False, "is the name of its host right"),
        (
            "errors resolving a:1: address lookup failed for a:1: Domain name not found",
            False,
            False,
            "is the name",
        ),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca", True, True, "it may refuse this client's"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", True, False, "has expired"),
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate", True, False, "give its ca"),
    ],
)
def test_what_is_known_is_said(details: str, tls: bool, certificate: bool, said: str) -> None:
    found = meaning(details, tls=tls, certificate=certificate)
    assert found.startswith(said) or said in found
    assert bool(found) == bool(said)
