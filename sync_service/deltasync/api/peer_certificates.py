"""The names in a peer's certificate, in one order for gRPC and HTTP: what they are taken for is not said here."""

from collections.abc import Mapping, Sequence
from typing import Any

# Kinds of subject alternative names, as `ssl` calls them; an address says where a peer is, not who it is.
_KINDS = ("DNS", "URI", "email")


def names_of_certificate(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The names in a certificate that a TLS handshake has verified.

    Args:
        certificate: as `ssl.SSLObject.getpeercert` returns it; None or empty without one.

    Returns:
        The DNS, URI and e-mail subject alternative names in the order of the certificate, then the common name;
        empty without a certificate.
    """
    if not certificate:
        return ()
    alternative = [name for kind, name in certificate.get("subjectAltName", ()) if kind in _KINDS]
    parts = [pair for part in certificate.get("subject", ()) for pair in part]
    return _unique([*alternative, *(name for kind, name in parts if kind == "commonName")])


def names_of_auth_context(context: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """The same of a gRPC call.

    Args:
        context: `grpc.aio.ServicerContext.auth_context()`; empty without TLS.
    """
    addresses = set(context.get("x509_ip", ()))
    keys = ("x509_subject_alternative_name", "x509_common_name")
    found = [name for key in keys for name in context.get(key, ()) if name not in addresses]
    return _unique([name.decode(errors="replace") for name in found])


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
