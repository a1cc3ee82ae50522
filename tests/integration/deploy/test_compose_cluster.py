"""Compose with three brokers and three processes: what the second file says, put on top of the first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deployments import compose_file, run_access

Doc = dict[str, Any]

PROCESSES = ("service", "service-1", "service-2")
BROKERS = ("nats-0", "nats-1", "nats-2")


@pytest.fixture(scope="module")
def cluster(deploy: Path) -> Doc:
    return compose_file(deploy / "compose.cluster.yaml")


@pytest.fixture(scope="module")
def services(compose: Doc, cluster: Doc) -> dict[str, Doc]:
    """Those of both files, as compose puts them together, as far as is looked at here."""
    both = dict(compose["services"])
    for name, service in cluster["services"].items():
        base = both.get(service.get("extends", {}).get("service", name), {})
        environment = base.get("environment", {}) | service.get("environment", {})
        own = name in compose["services"]
        volumes = [*(base.get("volumes", []) if own else []), *service.get("volumes", [])]
        both[name] = base | service | {"environment": environment, "volumes": volumes}
    return both


def test_volumes_are_there_and_each_has_its_own_data(compose: Doc, cluster: Doc, services: dict[str, Doc]) -> None:
    mounts = {name: [each.split(":") for each in service["volumes"]] for name, service in services.items()}
    volumes = compose["volumes"].keys() | cluster["volumes"].keys()
    assert {volume for each in mounts.values() for volume, *_ in each} == volumes
    for names, path in ((PROCESSES, "/var/lib/deltasync"), (BROKERS, "/data")):
        assert len({volume for name in names for volume, at, *_ in mounts[name] if at == path}) == 3


def test_processes_have_names_of_their_own_and_know_all_brokers(services: dict[str, Doc]) -> None:
    for name in PROCESSES:
        environment = services[name]["environment"]
        assert environment["DELTASYNC_PROCESS"] == name
        assert environment["DELTASYNC_ADVERTISE_GRPC"] == f"{name}:50051"
        assert environment["DELTASYNC_ADVERTISE_HTTP"] == f"https://{name}:8080"
        assert environment["DELTASYNC_LOG"].split(",") == [f"tls://{broker}:4222" for broker in BROKERS]
        assert environment["DELTASYNC_LOG_MONITOR"].split(",") == [f"http://{broker}:8222" for broker in BROKERS]
    for name in BROKERS:
        assert services[name]["environment"]["NAME"] == name
        assert json.loads(services[name]["environment"]["ROUTES"]) == [f"nats://{each}:6222" for each in BROKERS]
    for name in ("trainer", "predictor-1", "predictor-2"):
        assert services[name]["environment"]["DELTASYNC_SERVICE"] == ",".join(f"{p}:50051" for p in PROCESSES)


def test_brokers_have_the_configuration_that_is_tried_for_kubernetes(
    deploy: Path, cluster: Doc, services: dict[str, Doc]
) -> None:
    path = deploy / cluster["configs"]["nats"]["file"]
    assert path == deploy / "kubernetes-cluster/nats.conf"
    variables = set(re.findall(r"\$(\w+)", path.read_text()))
    for name in BROKERS:
        assert services[name]["environment"].keys() == variables


def test_storage_is_started_as_in_kubernetes(deploy: Path, services: dict[str, Doc]) -> None:
    docs = yaml.safe_load_all((deploy / "kubernetes-cluster/storage.yaml").read_text())
    (pod,) = [doc["spec"]["template"]["spec"] for doc in docs if doc["kind"] == "StatefulSet"]
    paths = {
        "/run/secrets/tls/tls.crt": "/run/deltasync/cert.pem",
        "/run/secrets/tls/tls.key": "/run/deltasync/key.pem",
        "/run/secrets/access/": "/run/deltasync/",
    }
    arguments = " ".join(pod["containers"][0]["args"])
    for there, here in paths.items():
        arguments = arguments.replace(there, here)
    assert services["storage"]["command"] == arguments.split()
    assert services["storage"]["entrypoint"] == pod["containers"][0]["command"]


def test_images_are_those_of_kubernetes(deploy: Path, services: dict[str, Doc]) -> None:
    found = yaml.safe_load((deploy / "kubernetes-cluster/kustomization.yaml").read_text())["images"]
    images = {f"{image.get('newName', image['name'])}:{image['newTag']}" for image in found}
    assert {services[name]["image"] for name in (*BROKERS, "storage")} == images


@pytest.mark.nightly
def test_each_gets_its_own_certificate_and_the_key_of_the_storage(
    services: dict[str, Doc], tmp_path: Path
) -> None:
    root = run_access([services["access"], services["storage-key"]], tmp_path)
    for name in ("nats", "storage", "trainer", "predictor", "service"):
        assert {"ca.pem", "cert.pem", "key.pem"} <= {path.name for path in (root / name).iterdir()}
    (identity,) = json.loads((root / "storage/s3.json").read_text())["identities"]
    (credentials,) = identity["credentials"]
    assert f"aws_secret_access_key = {credentials['secretKey']}\n" in (root / "service/storage.ini").read_text()
    before = (root / "service/storage.ini").read_bytes()
    run_access([services["access"], services["storage-key"]], tmp_path)
    assert (root / "service/storage.ini").read_bytes() == before
