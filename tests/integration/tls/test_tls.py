"""Both ports over TLS: who is let in and as whom, what is said to others, and files that change meanwhile."""

import re
import socket
import ssl
from asyncio import constants
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.fleet import Recorder, Trainer, follow
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for

from deltasync.access import tls
from deltasync.access.tls import TlsOptions, names_of_auth_context, names_of_certificate
from deltasync.client import Admin, Endpoint, InvalidInput, NotPermitted, ServiceUnavailable

WAIT = 20.0


class Pki:
    """A folder with the CA of a service, that of its clients, and what they have signed.

    What is issued again is written over what there was, as whoever renews certificates does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.services, self.clients = trustme.CA(), trustme.CA()
        self.write_cas()
        self.issue_service()
        self.issue_client()

    @property
    def options(self) -> TlsOptions:
        return TlsOptions(
            cert=self.path("service"), key=self.path("service-key"), client_ca=self.path("clients-ca")
        )

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.pem"

    def write_cas(self) -> None:
        self.path("services-ca").write_bytes(self.services.cert_pem.bytes())
        self.path("clients-ca").write_bytes(self.clients.cert_pem.bytes())

    def issue_service(self, *names: str, expired: bool = False) -> None:
        past = datetime.now(UTC) - timedelta(days=2)
        times: dict[str, Any] = {"not_before": past, "not_after": past + timedelta(days=1)} if expired else {}
        self._write("service", self.services.issue_cert(*(names or ("localhost", "127.0.0.1")), **times))

    def issue_client(self, name: str = "trainer.example", ca: trustme.CA | None = None) -> None:
        self._write("client", (ca or self.clients).issue_cert(name, common_name="a trainer"))

    def endpoint(self, address: str, **settings: Any) -> Endpoint:
        """Of a client that shows its certificate."""
        shown = {"cert": self.path("client"), "key": self.path("client-key")}
        return Endpoint(address, **{"ca": self.path("services-ca"), **shown, **settings})

    def _write(self, name: str, issued: trustme.LeafCert) -> None:
        """The key first: a pair that does not fit is not taken over, and the next look finds both."""
        for path, content in (
            (self.path(f"{name}-key"), issued.private_key_pem.bytes()),
            (self.path(name), b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ):
            path.touch(0o600)
            path.write_bytes(content)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path / "pki")


@pytest.fixture
def service(tmp_path: Path, pki: Pki) -> Iterator[RunningService]:
    """With mutual TLS, and a look at the files ever so often."""
    with secured(tmp_path, pki) as found:
        yield found


def secured(tmp_path: Path, pki: Pki, **settings: Any) -> RunningService:
    service = RunningService(tmp_path / "data")
    files = pki.options
    settings |= {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.client_ca}
    service.options = replace(service.options, look_seconds=0.01, **settings)
    return service


def until(said: str, ask: Callable[[], object]) -> None:
    """Ask until it fails in these words."""

    def answer() -> str:
        try:
            return str(ask())
        except ServiceUnavailable as error:
            return str(error)

    wait_for(lambda: re.search(said, answer()), answer)


def metrics(service: RunningService, pki: Pki) -> str:
    context = ssl.create_default_context(cafile=pki.path("services-ca"))
    host, port = service.http.removeprefix("https://").split(":")
    plain = socket.create_connection((host, int(port)))
    with context.wrap_socket(plain, server_hostname=host) as secure:
        secure.sendall(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: secure.recv(1 << 16), b"")).decode()


def events(service: RunningService, pki: Pki) -> dict[str, int]:
    """How often each thing has happened, as its metrics say."""
    found = re.findall(r'^deltasync_events_total\{event="(\w+)"\} (\d+)', metrics(service, pki), re.MULTILINE)
    return {name: int(number) for name, number in found}


def wait_for_event(service: RunningService, pki: Pki, kind: str, number: int) -> None:
    wait_for(lambda: events(service, pki)[kind] >= number, kind)


def test_rows_go_from_a_trainer_to_a_replica(service: RunningService, pki: Pki) -> None:
    endpoint, target = pki.endpoint(service.grpc), Recorder()
    with Trainer(endpoint) as trainer, follow_with(endpoint, target) as replica:
        head = trainer.publish_all()
        replica.wait_for(head, WAIT)
    assert target.bytes() == trainer.expected()
    assert service.http.startswith("https://")
    assert Admin(pki.endpoint(service.grpc, http=service.http)).consumer("predictors")["head"] == 1


def follow_with(endpoint: Endpoint, target: Any) -> Any:
    class At:
        grpc = endpoint

    return follow(At, "predictors", "r", target)  # type: ignore[arg-type]


def test_a_client_without_a_certificate_is_refused_by_grpc_and_not_by_http(
    service: RunningService, pki: Pki
) -> None:
    nobody = Endpoint(service.grpc, ca=pki.path("services-ca"))
    with pytest.raises(ServiceUnavailable, match="may need a client certificate: set cert and key"):
        checked(nobody)
    assert Admin(replace(nobody, http=service.http)).consumer("predictors")["state"]


def test_a_foreign_certificate_is_refused(service: RunningService, pki: Pki) -> None:
    pki.issue_client(ca=trustme.CA())
    for address in (service.grpc, service.http):
        with pytest.raises(ServiceUnavailable, match="may refuse this client's certificate"):
            ask(pki.endpoint(address))


def test_another_ca_is_not_believed(service: RunningService, pki: Pki) -> None:
    pki.path("services-ca").write_bytes(trustme.CA().cert_pem.bytes())
    for address in (service.grpc, service.http):
        with pytest.raises(ServiceUnavailable, match="its certificate is not from a CA that this client trusts"):
            ask(pki.endpoint(address))


def test_a_certificate_of_another_name_is_refused_unless_it_is_given(tmp_path: Path, pki: Pki) -> None:
    pki.issue_service("elsewhere.example")
    with secured(tmp_path, pki) as service:
        for address in (service.grpc, service.http):
            endpoint = pki.endpoint(address)
            with pytest.raises(ServiceUnavailable, match="its certificate is for another name"):
                ask(endpoint)
            ask(replace(endpoint, server_name="elsewhere.example"))


def ask(endpoint: Endpoint) -> object:
    if endpoint.address.startswith("https://"):
        return Admin(endpoint).consumer("predictors")
    return checked(endpoint)


def ask_both(service: RunningService, pki: Pki) -> None:
    for address in (service.grpc, service.http):
        ask(pki.endpoint(address))


def checked(endpoint: Endpoint) -> object:
    """What a health check is answered, over gRPC."""
    with endpoint.channel() as channel:
        try:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        except grpc.RpcError as failure:
            raise endpoint.error_of(failure) from failure


def asked(pki: Pki, address: str) -> object:
    return ask(pki.endpoint(address))


def test_an_expired_certificate_is_said_to_be_on_both_sides(tmp_path: Path, pki: Pki, caplog: Any) -> None:
    pki.issue_service(expired=True)
    with secured(tmp_path, pki) as service:
        for address in (service.grpc, service.http):
            with pytest.raises(ServiceUnavailable, match="has expired, or this machine's clock is wrong"):
                ask(pki.endpoint(address))
    assert "certificate expired: a certificate of tls_cert has expired" in caplog.text


def test_plain_text_and_tls_find_each_other_out(tmp_path: Path, service: RunningService, pki: Pki) -> None:
    with pytest.raises(ServiceUnavailable, match="this port may need TLS: set ca"):
        checked(Endpoint(service.grpc))
    with pytest.raises(ServiceUnavailable, match="this port may need TLS"):
        Admin(service.http.replace("https", "http")).consumer("predictors")
    with RunningService(tmp_path / "plain") as plain:
        for address in (plain.grpc, plain.http.replace("http", "https")):
            with pytest.raises(ServiceUnavailable, match="this port does not use TLS"):
                ask(pki.endpoint(address))


def test_the_certificate_of_the_service_is_renewed_while_it_runs(service: RunningService, pki: Pki) -> None:
    endpoint, target = pki.endpoint(service.grpc), Recorder()
    with Trainer(endpoint) as trainer, follow_with(endpoint, target) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        pki.issue_service("renewed.example")
        for address in (service.grpc, service.http):
            until("its certificate is for another name", partial(asked, pki, address))
            ask(pki.endpoint(address, server_name="renewed.example"))
        replica.wait_for(trainer.change(3), WAIT)  # Who is connected stays so.
    assert target.bytes() == trainer.expected()


def test_the_ca_of_the_service_is_renewed_on_both_sides(service: RunningService, pki: Pki) -> None:
    """A trainer and a replica that were connected go on where the service comes back with another CA."""
    endpoint, target = pki.endpoint(service.grpc), Recorder()
    with Trainer(endpoint) as trainer, follow_with(endpoint, target) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        pki.services = trustme.CA()
        pki.issue_service()
        for address in (service.grpc, service.http):
            until("not from a CA that this client trusts", partial(asked, pki, address))
        before = service.grpc, service.http
        service.stop()
        service.options = replace(
            service.options,
            grpc_port=int(before[0].rpartition(":")[2]),
            http_port=int(before[1].rpartition(":")[2]),
        )
        service.start()
        until("not from a CA that this client trusts", lambda: replica.connection)
        pki.write_cas()
        replica.wait_for(trainer.change(3), WAIT)
        ask_both(service, pki)
    assert target.bytes() == trainer.expected()


def test_the_ca_of_the_clients_and_their_certificates_are_renewed(service: RunningService, pki: Pki) -> None:
    old = pki.clients
    pki.clients = trustme.CA()
    pki.write_cas()
    for address in (service.grpc, service.http):
        until("may refuse this client's certificate", partial(asked, pki, address))
    pki.issue_client()
    ask_both(service, pki)
    pki.issue_client(ca=old)
    with pytest.raises(ServiceUnavailable, match="may refuse this client's certificate"):
        ask(pki.endpoint(service.grpc))


@pytest.mark.parametrize("content", [b"", b"no PEM", None], ids=["empty", "garbage", "gone"])
def test_files_that_are_not_sound_leave_the_ones_before_in_use(
    service: RunningService, pki: Pki, content: bytes | None
) -> None:
    before = pki.path("service").read_bytes()
    if content is None:
        pki.path("service").unlink()
    else:
        pki.path("service").write_bytes(content)
    wait_for_event(service, pki, "certificate_refused", 1)
    ask_both(service, pki)
    pki.path("service").write_bytes(before)


def test_a_key_of_another_certificate_is_not_taken_over(service: RunningService, pki: Pki, caplog: Any) -> None:
    pki.path("service-key").write_bytes(pki.path("client-key").read_bytes())
    wait_for_event(service, pki, "certificate_refused", 1)
    assert "service-key.pem is not the key of the certificate in" in caplog.text
    ask(pki.endpoint(service.grpc))
    pki.issue_service()
    wait_for_event(service, pki, "certificate_reloaded", 1)
    ask(pki.endpoint(service.grpc))


def test_when_certificates_expire_is_a_metric_and_an_open_key_a_warning(
    tmp_path: Path, pki: Pki, caplog: Any
) -> None:
    pki.path("service-key").chmod(0o644)
    with secured(tmp_path, pki) as service:
        assert events(service, pki)["key_exposed"] == 1
        shown = re.findall(
            r'^deltasync_certificate_expires_seconds\{setting="(\w+)"\} (.+)', metrics(service, pki), re.M
        )
        (leaf,) = x509.load_pem_x509_certificates(pki.path("service").read_bytes())
        assert {name: float(at) for name, at in shown}["tls_cert"] == leaf.not_valid_after_utc.timestamp()
    assert "can be read by every user of this machine: chmod o-rwx" in caplog.text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("service", "service.pem: No such file or directory"),
        ("client", "is not the key of the certificate"),
        ("text", "expected certificates in PEM"),
    ],
)
def test_files_that_are_not_sound_at_the_start_are_one_clear_error(
    tmp_path: Path, pki: Pki, damage: str, said: str
) -> None:
    if damage == "service":
        pki.path("service").unlink()
    elif damage == "client":
        pki.path("service-key").write_bytes(pki.path("client-key").read_bytes())
    else:
        pki.path("service").write_text("text")
    options = pki.options
    service = ServiceProcess(tmp_path / "data", "--tls-cert", str(options.cert), "--tls-key", str(options.key))
    ended = service.run_to_end()
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_peers_that_fail_in_the_handshake_leave_no_line_in_the_log(
    tmp_path: Path, pki: Pki, capfd: pytest.CaptureFixture[str]
) -> None:
    options = pki.options
    files = ("--tls-cert", str(options.cert), "--tls-key", str(options.key), "--tls-client-ca")
    with ServiceProcess(tmp_path / "data", *files, str(options.client_ca), fresh=True) as service:
        ask(pki.endpoint(service.grpc))
        capfd.readouterr()
        for address in (service.grpc, service.http.removeprefix("https://")):
            host, port = address.split(":")
            for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(1000)):
                with socket.create_connection((host, int(port))) as peer, suppress(ConnectionError):
                    peer.sendall(sent)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1000):
                        pass
        with pytest.raises(ServiceUnavailable):
            ask(Endpoint(service.grpc))
        ask(pki.endpoint(service.grpc))
        said = capfd.readouterr().err
    # Of this process, the client of which gRPC's C library says so, and not of the service's.
    assert [line for line in said.splitlines() if "deltasync" in line or "Handshake" in line] == []


@pytest.mark.nightly
def test_a_connection_that_does_not_finish_its_handshake_is_closed(
    tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise after a minute, and after two: so long each would hold a descriptor."""
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.1)
    monkeypatch.setattr(constants, "SSL_HANDSHAKE_TIMEOUT", 60.0)
    hello = b"\x16\x03\x01\x02\x00\x01"
    with secured(tmp_path, pki) as service:
        for address in (service.grpc, service.http.removeprefix("https://")):
            host, port = address.split(":")
            for begun in (b"", hello):
                with socket.create_connection((host, int(port)), timeout=WAIT) as peer, suppress(ConnectionError):
                    peer.sendall(begun)
                    while peer.recv(1000):
                        pass


def test_tls_of_before_1_2_is_not_spoken(service: RunningService, pki: Pki) -> None:
    context = ssl.create_default_context(cafile=pki.path("services-ca"))
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    for address in (service.grpc, service.http.removeprefix("https://")):
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain, server_hostname=host)


def test_files_of_a_client_that_cannot_be_used_are_refused_at_once(pki: Pki) -> None:
    pki.path("client-key").write_bytes(pki.path("service-key").read_bytes())
    with pytest.raises(InvalidInput, match="the key does not belong to the certificate"):
        Admin(pki.endpoint("https://localhost:1"))
    with pytest.raises(InvalidInput, match="No such file"):
        Admin(Endpoint("https://localhost:1", ca=pki.path("none")))


def test_a_token_file_is_read_anew_for_each_call(tmp_path: Path, service: RunningService, pki: Pki) -> None:
    path = tmp_path / "token"
    path.write_text("wrong\n")
    admin = Admin(pki.endpoint(service.http, token_file=path))
    with pytest.raises(Exception, match="token"):
        admin.pause_consumer("probes")
    path.write_text(f"{TOKEN}\n")
    admin.pause_consumer("probes")


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


def test_a_certificate_has_its_roles_on_both_ports(tmp_path: Path, pki: Pki) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text('[certificates."reader.example"]\nroles = ["read"]\n')
    roles.chmod(0o600)
    with secured(tmp_path, pki, roles=roles) as service:
        pki.issue_client("reader.example")
        reader = pki.endpoint(service.grpc, http=service.http)
        assert [each["consumer"] for each in Admin(reader).consumers()] == ["predictors", "probes"]
        assert Admin(reader).consumer("predictors")["state"]
        with pytest.raises(NotPermitted, match="has no role admin"):
            Admin(reader).pause_consumer("probes")
        pki.issue_client("stranger.example")
        for ask in (lambda: Admin(reader).consumers(), lambda: Admin(reader).consumer("predictors")):
            with pytest.raises(NotPermitted, match="role read is required"):
                ask()
        with pytest.raises(NotPermitted, match="role read is required"):
            Admin(Endpoint(service.http, ca=pki.path("services-ca"))).consumer("predictors")
