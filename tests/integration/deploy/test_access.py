"""Deployments let in whom they are to, and nobody else: each is started with what its files and the README say."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from tests.support.deployments import (
    COMMAND,
    Deployed,
    Secrets,
    compose_configs,
    deployed,
    https,
    made_secrets,
    mounted_secrets,
    readme_lines,
    run_access,
    run_lines,
    values_of,
    wait_for_probe,
)

from deltasync.client import Endpoint
from deltasync.v1 import publish_pb2, publish_pb2_grpc, subscribe_pb2, subscribe_pb2_grpc

Doc = dict[str, Any]

_DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def secrets(deploy: Path, tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return made_secrets(readme_lines(deploy / "README.md", "Kubernetes"), tmp_path_factory.mktemp("kubernetes"))


def _pod(manifests: list[Doc], kind: str) -> Doc:
    (doc,) = [doc for doc in manifests if doc["kind"] == kind]
    return dict(doc["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def pod(
    deploy: Path, manifests: list[Doc], secrets: Secrets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """The service of the StatefulSet."""
    folder, pod = tmp_path_factory.mktemp("pod"), _pod(manifests, "StatefulSet")
    places = mounted_secrets(pod, secrets, folder) | {"/etc/deltasync": deploy / "kubernetes"}
    with deployed(
        pod["containers"][0]["args"], values_of(pod["containers"][0]), folder / "data", places
    ) as service:
        yield service


def _client(service: Deployed, manifests: list[Doc], secrets: Secrets, kind: str, folder: Path) -> Endpoint:
    """The endpoint of a client, with the files that its pod shows."""
    pod = _pod(manifests, kind)
    environment, places = values_of(pod["containers"][0]), mounted_secrets(pod, secrets, folder)
    shown = {name: environment[f"DELTASYNC_{name.upper()}"] for name in ("ca", "cert", "key")}
    for path, place in places.items():
        shown = {name: value.replace(path, str(place)) for name, value in shown.items()}
    return Endpoint(f"127.0.0.1:{service.grpc}", server_name="deltasync", **shown)  # type: ignore[arg-type]


def _open(channel: grpc.Channel, model: str) -> None:
    """Open a stream of a rank that announces no tables."""
    request = publish_pb2.PublishRequest(open=publish_pb2.PublishOpen(model=model))
    for _ in publish_pb2_grpc.PublishServiceStub(channel).Publish(iter([request]), timeout=20):
        pass


def _refused(endpoint: Endpoint, *, model: str = "", consumer: str = "") -> bool:
    """Whether a call for a model, or for a consumer, is refused for want of a role."""
    with endpoint.channel() as channel:
        try:
            if model:
                _open(channel, model)
            else:
                subscribe = subscribe_pb2_grpc.SubscribeServiceStub(channel)
                subscribe.Leave(subscribe_pb2.LeaveRequest(consumer=consumer, replica="a"), timeout=20)
        except grpc.RpcError as error:
            code = error.code()
            if code not in (_DENIED, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise
            return bool(code is _DENIED)
    return False


@pytest.mark.nightly
def test_probes_of_kubernetes_are_answered_without_a_certificate(pod: Deployed, manifests: list[Doc]) -> None:
    (container,) = _pod(manifests, "StatefulSet")["containers"]
    for kind in ("startup", "liveness", "readiness"):
        probe = container[f"{kind}Probe"]["httpGet"]
        assert probe["scheme"] == "HTTPS"
        assert https(pod, probe["path"]).status_code == 200


def test_prometheus_reads_metrics_with_what_its_monitor_names(
    deploy: Path, pod: Deployed, secrets: Secrets
) -> None:
    monitors = yaml.safe_load_all((deploy / "kubernetes/prometheus-operator/monitors.yaml").read_text())
    endpoint = next(iter(monitors))["spec"]["endpoints"][0]
    token, ca = endpoint["authorization"]["credentials"], endpoint["tlsConfig"]["ca"]["secret"]
    shown = secrets[token["name"]][token["key"]].read_text().strip()
    trusted, name = secrets[ca["name"]][ca["key"]], endpoint["tlsConfig"]["serverName"]
    assert https(pod, "/metrics", trusted, shown, name).status_code == 200
    assert https(pod, "/metrics", trusted, name=name).status_code == 403
    with pytest.raises(httpx.ConnectError):
        https(pod, "/metrics", trusted, shown, "another")


def test_a_trainer_may_publish_its_model_and_a_predictor_subscribe(
    pod: Deployed, manifests: list[Doc], secrets: Secrets, tmp_path: Path
) -> None:
    trainer = _client(pod, manifests, secrets, "Job", tmp_path / "trainer")
    predictor = _client(pod, manifests, secrets, "Deployment", tmp_path / "predictor")
    assert not _refused(trainer, model="clicks")
    assert _refused(trainer, model="others")
    assert _refused(trainer, consumer="predictors")
    assert not _refused(predictor, consumer="predictors")
    assert _refused(predictor, model="clicks")


def test_a_pod_without_a_certificate_reaches_nothing(pod: Deployed, secrets: Secrets) -> None:
    stranger = Endpoint(f"127.0.0.1:{pod.grpc}", ca=secrets["deltasync-tls"]["ca.crt"], server_name="deltasync")
    with stranger.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        _open(channel, "clicks")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_operators_have_their_commands_in_the_pod(pod: Deployed) -> None:
    file = pod.places["/etc/deltasync"] / "endpoint.toml"
    for line in ("lag predictors", "consumers pause predictors --reason test", "consumers resume predictors"):
        done = subprocess.run(
            [*COMMAND, *line.split()],
            env={"DELTASYNC_ENDPOINT": str(file), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def unit_service(
    deploy: Path, unit: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """The service of the systemd unit, with the files that the README's lines install."""
    folder = tmp_path_factory.mktemp("systemd")
    lines = [line.replace("/opt/deltasync/bin/", "") for line in readme_lines(deploy / "README.md", "systemd")]
    run_lines([line for line in lines if line.startswith("deltasync ") or "> access/" in line], folder)
    etc, credentials = folder / "etc", folder / "credentials"
    etc.mkdir()
    credentials.mkdir()
    for words in map(shlex.split, lines):
        if words[:1] == ["install"] and words[-1].startswith("/etc/deltasync/"):
            source = (
                words[-2]
                if words[-2].startswith("/")
                else next(each for each in (folder / words[-2], deploy.parent / words[-2]) if each.exists())
            )
            (etc / Path(words[-1]).name).write_bytes(Path(source).read_bytes())
    at_run = "/run/credentials/deltasync.service"  # Which is what systemd makes of %d.
    places = {"%d": credentials, at_run: credentials, "%S": folder / "state", "/etc/deltasync": etc}
    for name, source in [value.split(":") for key, value in unit if key == "LoadCredential"]:
        (credentials / name).write_bytes((etc / Path(source).name).read_bytes())
    _, *arguments = shlex.split(dict(unit)["ExecStart"])
    with deployed(arguments, {}, folder / "data", places) as service:
        yield service


@pytest.mark.nightly
def test_the_unit_starts_with_what_the_readme_installs(unit_service: Deployed) -> None:
    etc = unit_service.places["/etc/deltasync"]
    assert https(unit_service, "/readyz", etc / "ca.pem").status_code == 200
    assert https(unit_service, "/metrics", etc / "ca.pem").status_code == 403
    token = (etc / "admin-token").read_text().strip()
    assert https(unit_service, "/metrics", etc / "ca.pem", token).status_code == 200


@pytest.fixture(scope="module")
def compose_service(deploy: Path, compose: Doc, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """The service of compose, with what its service `access` has made, which is asked for twice."""
    folder = tmp_path_factory.mktemp("compose")
    root = run_access([compose["services"]["access"]], folder)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    run_access([compose["services"]["access"]], folder)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    service = compose["services"]["service"]
    given = compose_configs(deploy / "compose.yaml", service, folder / "given")
    places = {"/run/deltasync": root / "service", "/etc/deltasync": given}
    with deployed(service["command"], service["environment"], folder / "data", places) as running:
        yield running


@pytest.mark.nightly
def test_compose_is_healthy_with_the_certificates_that_it_makes(compose: Doc, compose_service: Deployed) -> None:
    *_, code = compose["services"]["service"]["healthcheck"]["test"]
    here = compose_service.here(code).replace(":8080", f":{compose_service.http}")
    assert subprocess.run([sys.executable, "-c", here], timeout=60).returncode == 0


def test_compose_gives_each_its_own_certificate_and_no_more(compose: Doc, compose_service: Deployed) -> None:
    made = compose_service.places["/run/deltasync"].parent
    for name in ("trainer", "predictor"):
        assert {path.name for path in (made / name).iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert not (made / "made").exists()
    mounts = {
        name: [mount.split(":")[0] for mount in service["volumes"] if ":/run/deltasync" in mount]
        for name, service in compose["services"].items()
        if name != "access"
    }
    assert mounts == {
        "service": ["service-access"],
        "trainer": ["trainer-access"],
        "predictor-1": ["predictor-access"],
        "predictor-2": ["predictor-access"],
    }


@pytest.mark.parametrize(("name", "model"), [("trainer", True), ("predictor-1", False)])
def test_compose_lets_in_trainer_and_predictors(
    compose: Doc, compose_service: Deployed, name: str, model: bool
) -> None:
    folder = compose_service.places["/run/deltasync"].parent / name.removesuffix("-1")
    environment = compose["services"][name]["environment"]
    shown = {key: folder / Path(environment[f"DELTASYNC_{key.upper()}"]).name for key in ("ca", "cert", "key")}
    endpoint = Endpoint(f"localhost:{compose_service.grpc}", **shown)  # type: ignore[arg-type]
    assert _refused(endpoint, model="clicks") is not model
    assert _refused(endpoint, consumer="predictors") is model


def test_the_probe_has_the_roles_it_needs_in_kubernetes(pod: Deployed, secrets: Secrets) -> None:
    made = secrets["deltasync-access"]["roles.toml"].parent
    wait_for_probe(pod, made / "ca.pem", made / "operator-token")


@pytest.mark.nightly
def test_the_probe_has_the_roles_it_needs_under_systemd(unit_service: Deployed) -> None:
    made = unit_service.places["%S"].parent / "access"
    wait_for_probe(unit_service, made / "ca.pem", made / "operator-token")


def test_the_page_asks_for_a_token_that_operators_have(pod: Deployed, secrets: Secrets) -> None:
    made = secrets["deltasync-access"]["roles.toml"].parent
    assert "<html" in https(pod, "/", made / "ca.pem").text
    assert https(pod, "/status", made / "ca.pem").status_code == 403
    token = (made / "operator-token").read_text().strip()
    assert https(pod, "/status", made / "ca.pem", token).status_code == 200
    assert https(pod, "/consumers", made / "ca.pem", token).status_code == 200


@pytest.mark.nightly
def test_the_probe_has_the_roles_it_needs_in_compose(compose_service: Deployed) -> None:
    given = compose_service.places["/run/deltasync"]
    wait_for_probe(compose_service, given / "ca.pem", given / "operator-token")


def test_nothing_secret_is_in_command_lines_and_environments(manifests: list[Doc], compose: Doc) -> None:
    """All of it is in files, and what is named here are their paths."""
    texts = []
    for doc in manifests:
        if "template" in doc.get("spec", {}):
            (container,) = doc["spec"]["template"]["spec"]["containers"]
            texts.append((container["args"], container["env"]))
            assert not [each for each in container["env"] if "secretKeyRef" in each.get("valueFrom", {})]
            assert "envFrom" not in container
    texts += [(each["command"], each.get("environment", {})) for each in compose["services"].values()]
    for arguments, environment in texts:
        words = json.dumps([arguments, environment])
        assert not re.search(r"DELTASYNC_(ADMIN_)?TOKEN\b(?!_FILE)|--(admin-)?token[= ]", words)
