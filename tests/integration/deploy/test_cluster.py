"""The overlay for several machines: what it says, and three brokers, storage and a service as it starts them."""

import json
import os
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.deployments import (
    Deployed,
    Secrets,
    deployed,
    https,
    made_secrets,
    mounted_secrets,
    moved,
    readme_lines,
    values_of,
    wait_for_probe,
)
from tests.support.fleet import Trainer
from tests.support.object_storage import weed_ports
from tests.support.ports import free_ports
from tests.support.programs import killed
from tests.support.waiting import wait_for

from deltasync.client import Admin, Endpoint

Doc = dict[str, Any]

HEADING = "Kubernetes, on several machines"
_WAIT = 60.0


def _set(docs: list[Doc], name: str) -> Doc:
    (found,) = [doc for doc in docs if (doc["kind"], doc["metadata"]["name"]) == ("StatefulSet", name)]
    return found


def _container(docs: list[Doc], name: str) -> Doc:
    (container,) = _set(docs, name)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def _argument(container: Doc, name: str) -> str:
    return next(str(each).split("=", 1)[1] for each in container["args"] if each.startswith(f"--{name}="))


def test_kustomize_renders_the_same(cluster_folder: Path, overlay: list[Doc], tool: Callable[[str], str]) -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", cluster_folder], capture_output=True, text=True, check=True
    )
    rendered = [doc for doc in yaml.safe_load_all(done.stdout) if doc["kind"] != "ConfigMap"]
    assert len(rendered) == len(overlay)
    assert _container(rendered, "deltasync")["args"] == _container(overlay, "deltasync")["args"]


def test_three_of_each_on_machines_of_their_own(overlay: list[Doc]) -> None:
    for name in ("deltasync", "nats"):
        spec = _set(overlay, name)["spec"]
        (rule,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert spec["replicas"] == 3
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert rule["labelSelector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_a_drained_node_takes_one_of_each_at_a_time(overlay: list[Doc]) -> None:
    budgets = {doc["metadata"]["name"]: doc["spec"] for doc in overlay if doc["kind"] == "PodDisruptionBudget"}
    assert budgets.keys() == {"deltasync", "nats", "deltasync-predictor"}
    for name in ("deltasync", "nats"):
        assert budgets[name]["maxUnavailable"] == 1
        assert budgets[name]["selector"]["matchLabels"] == _set(overlay, name)["spec"]["selector"]["matchLabels"]


def test_the_service_names_every_broker(overlay: list[Doc]) -> None:
    container, broker = _container(overlay, "deltasync"), _container(overlay, "nats")
    (routes,) = [each["value"] for each in broker["env"] if each["name"] == "ROUTES"]
    hosts = [f"nats-{number}.nats" for number in range(_set(overlay, "nats")["spec"]["replicas"])]
    assert _argument(container, "log").split(",") == [f"tls://{host}:4222" for host in hosts]
    assert _argument(container, "log-monitor").split(",") == [f"http://{host}:8222" for host in hosts]
    assert json.loads(routes) == [f"nats://{host}:6222" for host in hosts]


# As its pods are started, on this machine.


@pytest.fixture(scope="module")
def secrets(deploy: Path, tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """The Secrets that the README's lines make, by name and key; certificates have this machine's address, too."""
    folder = tmp_path_factory.mktemp("cluster")
    own, base = (readme_lines(deploy / "README.md", heading) for heading in (HEADING, "Kubernetes"))
    certs = own[0].replace("=nats-0.nats", "=127.0.0.1,nats-0.nats").replace("=storage", "=127.0.0.1,storage")
    lines = [certs if line.startswith("deltasync certs") else line for line in base] + own[1:]
    return made_secrets(lines, folder)


def _places(docs: list[Doc], name: str, secrets: Secrets, folder: Path) -> dict[str, Path]:
    return mounted_secrets(_set(docs, name)["spec"]["template"]["spec"], secrets, folder / name)


@pytest.fixture(scope="module")
def brokers(
    overlay: list[Doc],
    cluster_folder: Path,
    secrets: Secrets,
    tool: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, str]]:
    """Three, of the configuration of their pods; by each address in the overlay, where that is here."""
    place, conf = tmp_path_factory.mktemp("brokers"), (cluster_folder / "nats.conf").read_text()
    secret, broker = _places(overlay, "nats", secrets, place), _container(overlay, "nats")
    ports = iter(free_ports(9))
    here = {f"nats-{n}.nats:{port}": f"127.0.0.1:{next(ports)}" for n in range(3) for port in (4222, 6222, 8222)}
    with ExitStack() as stack:
        for n in range(3):
            own = conf.replace('"/data"', f'"{place}/data-{n}"')
            for port in (4222, 6222, 8222):
                own = own.replace(f'"0.0.0.0:{port}"', f'"{here[f"nats-{n}.nats:{port}"]}"')
            path = place / f"nats-{n}.conf"
            path.write_text(own)
            there = secret | {name: Path(at) for name, at in here.items()}
            own_environment = {name: moved(value, there) for name, value in values_of(broker).items()}
            process = subprocess.Popen(
                [tool("nats-server"), "-c", str(path), "-l", str(place / f"log-{n}")],
                env=os.environ | own_environment | {"NAME": f"nats-{n}"},
            )
            stack.enter_context(killed(process))
        probe = broker["readinessProbe"]["httpGet"]["path"]
        for n in range(3):
            _wait_until_healthy(f"http://{here[f'nats-{n}.nats:8222']}{probe}")
            # A pod of the service that comes before they have a leader is started again.
            _wait_until_healthy(f"http://{here[f'nats-{n}.nats:8222']}/healthz")
        yield here


def _answers(url: str, **settings: Any) -> httpx.Response | None:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5, **settings)
    return None


def _wait_until_healthy(url: str) -> None:
    wait_for(lambda: (answer := _answers(url)) and answer.is_success, url, _WAIT)


@pytest.fixture(scope="module")
def storage(
    overlay: list[Doc], secrets: Secrets, tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The object storage as its pod starts it, at a port here."""
    place, container = tmp_path_factory.mktemp("storage"), _container(overlay, "storage")
    places = _places(overlay, "storage", secrets, place) | {"/data": place / "data"}
    (place / "data").mkdir()
    s3, *others = weed_ports(4)
    arguments = [moved(each, places).replace("-s3.port=8333", f"-s3.port={s3}") for each in container["args"]]
    ports = [f"-{name}.port={port}" for name, port in zip(("master", "volume", "filer"), others, strict=True)]
    with (place / "log").open("wb") as log:
        process = subprocess.Popen([tool("weed"), *arguments, *ports], stdout=log, stderr=log)
    with killed(process):
        context = ssl.create_default_context(cafile=secrets["deltasync-tls"]["ca.crt"])
        url, log_of = f"https://127.0.0.1:{s3}", (place / "log").read_text
        wait_for(lambda: _answers(url, verify=context) is not None or process.poll() is not None, log_of, _WAIT)
        assert process.poll() is None, log_of()
        yield s3


@pytest.fixture(scope="module")
def service(
    overlay: list[Doc],
    deploy: Path,
    secrets: Secrets,
    brokers: dict[str, str],
    storage: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployed]:
    """The first of the three pods."""
    folder, container = tmp_path_factory.mktemp("service"), _container(overlay, "deltasync")
    places = _places(overlay, "deltasync", secrets, folder) | {"/etc/deltasync": deploy / "kubernetes"}
    elsewhere = {name: Path(at) for name, at in brokers.items()} | {"storage:8333": Path(f"127.0.0.1:{storage}")}
    environment = {name: moved(value, elsewhere) for name, value in values_of(container).items()}
    environment["AWS_SECRET_ACCESS_KEY"] = secrets["deltasync-storage"]["secret-key"].read_text()
    arguments = [moved(each, elsewhere).replace("$(POD_NAME)", "deltasync-0") for each in container["args"]]
    with deployed(arguments, environment, folder / "data", places) as running:
        yield running


def _get(service: Deployed, path: str, secrets: Secrets) -> httpx.Response:
    token = secrets["deltasync-access"]["admin-token"].read_text().strip()
    return https(service, path, secrets["deltasync-tls"]["ca.crt"], token)


@pytest.mark.nightly
def test_the_service_is_ready_with_brokers_that_are_believed(service: Deployed, secrets: Secrets) -> None:
    wait_for(lambda: _get(service, "/readyz", secrets).is_success, seconds=_WAIT)
    ready = _get(service, "/readyz", secrets)
    assert "accepted" not in ready.text
    (process,) = _get(service, "/processes", secrets).json()
    assert (process["process"], process["grpc"]) == ("deltasync-0", "deltasync-0.deltasync:50051")


@pytest.mark.nightly
def test_the_probe_has_the_roles_it_needs(service: Deployed, secrets: Secrets) -> None:
    wait_for_probe(service, secrets["deltasync-tls"]["ca.crt"], secrets["deltasync-access"]["admin-token"])
    models = [each["model"] for each in _get(service, "/models", secrets).json()]
    assert "deltasync-probe-deltasync-0" in models


@pytest.mark.nightly
def test_what_is_published_is_in_a_checkpoint_in_object_storage(service: Deployed, secrets: Secrets) -> None:
    def endpoint(name: str, token: str = "") -> Endpoint:
        files = secrets[f"deltasync-{name}tls"]
        return Endpoint(
            f"127.0.0.1:{service.grpc}",
            http=f"https://127.0.0.1:{service.http}",
            server_name="deltasync",
            token=token,
            ca=files["ca.crt"],
            cert=files["tls.crt"],
            key=files["tls.key"],
        )

    with Trainer(endpoint("trainer-")) as trainer:
        head = trainer.publish_all()
    admin = Admin(endpoint("", secrets["deltasync-access"]["admin-token"].read_text().strip()))
    made = admin.make_checkpoint("clicks")
    assert (made["version"], made["bytes"] > 0) == (head.number, True)
    models = _get(service, "/models", secrets).json()
    (listed,) = [each["checkpoint"] for each in models if each["model"] == "clicks"]
    assert (listed["version"], listed["reason"]) == (head.number, "")
