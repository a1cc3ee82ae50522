"""`deltasync certs`: certificates for a try-out."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from deltasync.access.tls import Certificates, TlsOptions
from deltasync.cli.certs import certs
from deltasync.client.endpoint import Endpoint


def test_what_is_made_is_what_both_sides_take(tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    done = CliRunner().invoke(certs, [str(folder), "--host", "db", "--client", "trainer", "--client", "a@b"])
    assert done.exit_code == 2, "an address of mail is no name of a file"
    done = CliRunner().invoke(certs, [str(folder), "--host", "db", "--client", "trainer", "--days", "3"])
    assert done.exit_code == 0, done.output
    assert "for a trial, until 2" in done.output
    pair = {"cert": folder / "service.pem", "key": folder / "service-key.pem"}
    Certificates.read(TlsOptions(**pair, client_ca=folder / "ca.pem"))
    Endpoint.of_grpc(
        Endpoint("db:1", ca=folder / "ca.pem", cert=folder / "trainer.pem", key=folder / "trainer-key.pem")
    )
    names = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {name: mode for name, mode in names.items() if name.endswith("-key.pem")} == {
        "service-key.pem": 0o600,
        "trainer-key.pem": 0o600,
    }
    (leaf,) = x509.load_pem_x509_certificates((folder / "trainer.pem").read_bytes())
    (found,) = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.value == "trainer"


def test_the_key_of_the_ca_is_kept_nowhere(tmp_path: Path) -> None:
    CliRunner().invoke(certs, [str(tmp_path / "pki"), "--client", "a"])
    (ca,) = x509.load_pem_x509_certificates((tmp_path / "pki" / "ca.pem").read_bytes())
    keys = [load_pem_private_key(path.read_bytes(), None) for path in (tmp_path / "pki").glob("*-key.pem")]
    assert len(keys) == 2
    assert ca.public_key() not in [key.public_key() for key in keys]


@pytest.mark.parametrize("there", ["ca.pem", "service-key.pem", "a.pem"])
def test_nothing_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    done = CliRunner().invoke(certs, [str(tmp_path), "--client", "a"])
    assert done.exit_code == 2
    assert f"{there} exists" in done.output
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there, "mine")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--client", "../evil"), "client name '../evil'"),
        (("--client", "service"), "expected distinct names other than"),
        (("--client", "a", "--client", "a"), "expected distinct names other than"),
        (("--host", "not a host\n"), "a name is not allowed in a certificate"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(certs, [str(tmp_path / "pki"), *arguments])
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "pki").exists()


@pytest.mark.parametrize("hosts", [[], ["--host", "db"], ["--host", "localhost", "--host", "db"]])
def test_the_service_s_certificate_is_always_for_this_machine_too(tmp_path: Path, hosts: list[str]) -> None:
    done = CliRunner().invoke(certs, [str(tmp_path / "pki"), *hosts])
    assert done.exit_code == 0, done.output
    (leaf,) = x509.load_pem_x509_certificates((tmp_path / "pki" / "service.pem").read_bytes())
    found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {*found.get_values_for_type(x509.DNSName)} == {"localhost", *hosts[1::2]}
    assert {*map(str, found.get_values_for_type(x509.IPAddress))} == {"127.0.0.1", "::1"}
