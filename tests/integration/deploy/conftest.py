import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).parents[3]


@pytest.fixture(scope="session")
def deploy(root: Path) -> Path:
    return root / "deploy"


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def stages(deploy: Path) -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's instructions by stage, those of a parent stage first."""
    text = (deploy / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    stages: dict[str, list[tuple[str, str]]] = {}
    before = [word for word, _ in lines].index("FROM")
    for word, rest in lines[before:]:
        if word == "FROM":
            parent, _, name = rest.split()
            stages[name] = list(stages.get(parent, []))
        else:
            stages[name].append((word, rest))
    return stages


@pytest.fixture(scope="session")
def compose(deploy: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((deploy / "compose.yaml").read_text()))


@pytest.fixture(scope="session")
def consumers(deploy: Path) -> dict[str, dict[str, Any]]:
    """The consumers of the configuration, by name."""
    settings = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    return dict(settings["consumers"])


@pytest.fixture(scope="session")
def manifests(deploy: Path) -> list[dict[str, Any]]:
    files = sorted((deploy / "kubernetes").glob("*.yaml"))
    return [
        doc for path in files if path.name != "kustomization.yaml" for doc in yaml.safe_load_all(path.read_text())
    ]


@pytest.fixture(scope="session")
def cluster_folder(deploy: Path) -> Path:
    return deploy / "kubernetes-cluster"


def _patched(doc: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """A document after some operations of JSON Patch (RFC 6902): `add` and `replace`."""
    patched: dict[str, Any] = json.loads(json.dumps(doc))
    for operation in patch:
        *path, last = operation["path"].strip("/").split("/")
        place: Any = patched
        for step in path:
            place = place[int(step) if isinstance(place, list) else step]
        if last == "-":
            place.append(operation["value"])
        else:
            assert (last in place) == (operation["op"] == "replace")
            place[last] = operation["value"]
    return patched


@pytest.fixture(scope="session")
def overlay(cluster_folder: Path, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the overlay makes of the manifests of one process, with its own."""
    kustomization = yaml.safe_load((cluster_folder / "kustomization.yaml").read_text())
    files = [name for name in kustomization["resources"] if name != "../kubernetes"]
    assert {"kustomization.yaml", "nats.conf", *files, *(each["path"] for each in kustomization["patches"])} == {
        path.name for path in cluster_folder.iterdir()
    }
    own = [yaml.safe_load_all((cluster_folder / name).read_text()) for name in files]
    docs = [*manifests, *(doc for some in own for doc in some)]
    for each in kustomization["patches"]:
        wanted = (each["target"]["kind"], each["target"]["name"])
        (index,) = [at for at, doc in enumerate(docs) if (doc["kind"], doc["metadata"]["name"]) == wanted]
        docs[index] = _patched(docs[index], yaml.safe_load((cluster_folder / each["path"]).read_text()))
    return docs


@pytest.fixture(scope="session")
def containers(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All containers of the Kubernetes manifests."""
    pods = [doc["spec"]["template"]["spec"] for doc in manifests if "template" in doc.get("spec", {})]
    return [container for pod in pods for container in pod["containers"]]


@pytest.fixture(scope="session")
def unit(deploy: Path) -> list[tuple[str, str]]:
    """The systemd unit's settings in order; a key may be there more than once."""
    lines = (deploy / "systemd/deltasync.service").read_text().replace("\\\n", " ").splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith(("[", "#"))]
    return [(key, value) for key, _, value in pairs]
