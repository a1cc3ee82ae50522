"""What may be wrong between a client and a service that do not connect, as far as their libraries tell."""

_OTHER_NAME = "its certificate is for another name, which server_name may say"
_OTHER_HOST = "is the name of its host right, and can this machine look it up?"
# What gRPC or OpenSSL says of it, and what that means; the first that fits.
_MEANINGS = {
    "Hostname Verification Check failed": _OTHER_NAME,
    "Hostname mismatch": _OTHER_NAME,
    "IP address mismatch": _OTHER_NAME,
    "certificate has expired": "its certificate, or its CA's, has expired, or this machine's clock is wrong",
    "certificate is not yet valid": "its certificate, or its CA's, is of later, or this machine's clock is wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the CA that was given, or, where none was, from "
    "those of this machine: give its ca",
    "Connection refused": "nothing listens there: is the service running, and is this its address?",
    "lookup failed": _OTHER_HOST,
    "service not known": _OTHER_HOST,
    "No address associated": _OTHER_HOST,
    "name resolution": _OTHER_HOST,
    "no HTTP answer": "perhaps gRPC is answered there: give the service's HTTP address, by default port 8080",
    "http1.x server": "HTTP is answered there: give the service's gRPC address, by default port 50051",
    "WRONG_VERSION_NUMBER": "it does not speak TLS there: give no CA, and http://, or the port that does",
}
# An alert that the other side has sent.
_ALERT = "_ALERT_"
# A handshake that the other side has broken off: gRPC does not tell why.
_BROKEN_OFF = ("Socket closed", "Connection reset", "Broken pipe")
_BEFORE_A_CONNECTION = "failed to connect"
# Likewise, as our service's HTTP does.
_NO_ANSWER = "Remote end closed connection without response"


def meaning(details: str, *, tls: bool, certificate: bool) -> str:
    """What a failed connection's details mean, in words; empty where they may mean anything.

    Args:
        details: what gRPC or OpenSSL says.
        tls: whether the client has tried to speak TLS.
        certificate: whether it has shown a certificate.
    """
    if sign := next((sign for sign in _MEANINGS if sign in details), None):
        return _MEANINGS[sign]
    if tls and _ALERT in details:
        return _refused(certificate)
    broken_off = _BEFORE_A_CONNECTION in details and any(sign in details for sign in _BROKEN_OFF)
    if tls and (broken_off or (certificate and _NO_ANSWER in details)):
        return _refused(certificate)
    if not tls and (broken_off or _NO_ANSWER in details):
        return "it may speak TLS there: give its CA, and https://"
    return ""


def _refused(certificate: bool) -> str:
    if certificate:
        return "it may refuse this client's certificate: is that of a CA that it knows, and not expired?"
    return "it may want a certificate of this client: give cert and key"
