"""Likely causes of failed connections, from the errors of gRPC, httpx and OpenSSL."""

_OTHER_NAME = "its certificate is for another name: set server_name to the name in it"
_OTHER_HOST = "is its host name right, and can this machine resolve it?"
# Errors of gRPC and OpenSSL, and their causes. The first match counts.
_MEANINGS = {
    "Hostname Verification Check failed": _OTHER_NAME,
    "Hostname mismatch": _OTHER_NAME,
    "IP address mismatch": _OTHER_NAME,
    "certificate has expired": "its certificate, or its CA's, has expired, or this machine's clock is wrong",
    "certificate is not yet valid": "its certificate, or its CA's, is not yet valid, or this machine's clock is "
    "wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from a CA that this client trusts: set ca to the file of "
    "the service's CA",
    "Connection refused": "nothing listens there: is the service running, and is this its address?",
    "lookup failed": _OTHER_HOST,
    "service not known": _OTHER_HOST,
    "No address associated": _OTHER_HOST,
    "name resolution": _OTHER_HOST,
    "no HTTP answer": "perhaps this is a gRPC port: use the service's HTTP address, by default port 8080",
    "http1.x server": "this is an HTTP port: use the service's gRPC address, by default port 50051",
    "WRONG_VERSION_NUMBER": "this port does not use TLS: use http:// and no CA, or the port with TLS",
}
# A TLS alert from the peer.
_ALERT = "_ALERT_"
# The peer aborted the handshake. gRPC does not report why.
_BROKEN_OFF = ("Socket closed", "Connection reset", "Broken pipe")
_BEFORE_A_CONNECTION = "failed to connect"
# The same over the service's HTTP.
_NO_ANSWER = "Server disconnected without sending a response"


def meaning(details: str, *, tls: bool, certificate: bool) -> str:
    """The likely cause of a failed connection, in words; empty if there is no single likely one.

    Args:
        details: the error of gRPC or OpenSSL.
        tls: whether the client used TLS.
        certificate: whether the client sent a certificate.
    """
    if sign := next((sign for sign in _MEANINGS if sign in details), None):
        return _MEANINGS[sign]
    if tls and _ALERT in details:
        return _certificate_hint(certificate)
    broken_off = _BEFORE_A_CONNECTION in details and any(sign in details for sign in _BROKEN_OFF)
    if _NO_ANSWER in details:  # A service that is killed leaves like a port of the other kind.
        return f"the service ended before it answered, or {_refusal(tls=tls, certificate=certificate)}"
    return _refusal(tls=tls, certificate=certificate) if broken_off else ""


def _refusal(*, tls: bool, certificate: bool) -> str:
    if not tls:
        return "this port may need TLS: set ca, and use https:// for HTTP"
    return _certificate_hint(certificate)


def _certificate_hint(certificate: bool) -> str:
    if certificate:
        return "it may refuse this client's certificate: is it still valid, and from a CA that the service trusts?"
    return "it may need a client certificate: set cert and key"
