"""The names in a client's certificate are the same for gRPC and for HTTP, and give it its roles."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificates import Pki
from tests.support.server import RunningService

from deltasync.api.peer_certificates import names_of_auth_context, names_of_certificate
from deltasync.client import Admin, Endpoint, NotPermitted
from deltasync.client.status import fetch_lag


def test_names_have_one_order() -> None:
    alternative = (("DNS", "a.example"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://b"), ("email", "c@d"))
    subject = ((("organizationName", "o"),), (("commonName", "cn"),))
    by_http = names_of_certificate({"subjectAltName": alternative, "subject": subject})
    by_grpc = names_of_auth_context(
        {
            "x509_subject_alternative_name": [b"a.example", b"10.0.0.1", b"spiffe://b", b"c@d"],
            "x509_ip": [b"10.0.0.1"],
            "x509_common_name": [b"cn"],
        }
    )
    assert by_http == by_grpc == ("a.example", "spiffe://b", "c@d", "cn")
    assert names_of_certificate(None) == names_of_certificate({}) == names_of_auth_context({}) == ()


def test_a_certificate_has_its_roles_on_both_ports(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    roles = tmp_path / "roles.toml"
    roles.write_text('[certificates."reader.example"]\nroles = ["read"]\n')
    roles.chmod(0o600)
    service = RunningService(tmp_path / "data")
    service.options = replace(service.options, tls=pki.options, roles=roles)
    with service:
        pki.issue_client("reader.example")
        reader = pki.endpoint(service.grpc, http=service.http)
        assert [each["consumer"] for each in Admin(reader).consumers()] == ["predictors", "probes"]
        assert fetch_lag(reader, "predictors")["state"]
        with pytest.raises(NotPermitted, match="has no role admin"):
            Admin(reader).pause_consumer("probes")
        pki.issue_client("stranger.example")
        for ask in (lambda: Admin(reader).consumers(), lambda: fetch_lag(reader, "predictors")):
            with pytest.raises(NotPermitted, match="role read is needed"):
                ask()
        with pytest.raises(NotPermitted, match="role read is needed"):
            fetch_lag(Endpoint(service.http, ca=pki.path("services-ca")), "predictors")
