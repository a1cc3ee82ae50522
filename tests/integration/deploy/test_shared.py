"""Predictors as workers over a mirror: the overlay for Kubernetes, and the second file for compose."""

import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from tests.support.deployments import check_schema, compose_file

from deltasync.cli.mirror import mirror
from deltasync.trainer.example.predictor import DRAIN_SECONDS, over_mirror

Doc = dict[str, Any]
APPLICATION = f"{over_mirror.__module__}:{over_mirror.__name__}"
WORKERS = ["python", "-m", "uvicorn", "--factory", APPLICATION]


@pytest.fixture(scope="module")
def rendered(deploy: Path, tool: Callable[[str], str]) -> dict[str, Doc]:
    """The rendered overlay, by kind; of the predictor's objects if there are several."""
    command = [tool("kubectl"), "kustomize", str(deploy / "kubernetes-shared")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    docs = list(yaml.safe_load_all(done.stdout))
    check_schema(docs)
    return {doc["kind"]: doc for doc in docs}


@pytest.fixture(scope="module")
def pod(rendered: dict[str, Doc]) -> Doc:
    return dict(rendered["Deployment"]["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def shared(deploy: Path) -> Doc:
    return compose_file(deploy / "compose.shared.yaml")


def assert_used(mirror_words: list[str], worker_words: list[str], name: str) -> None:
    """They name one mirror, and options that exist."""
    assert mirror_words[:2] == ["mirror", name]
    for command, words in ((mirror, mirror_words[2:]), (uvicorn.main, worker_words)):
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.split("=")[0] for word in words} <= known
    assert f"--timeout-graceful-shutdown={DRAIN_SECONDS}" in worker_words


def test_a_pod_has_one_mirror_in_whose_memory_its_workers_read(pod: Doc) -> None:
    (side,), (predictor,) = pod["initContainers"], pod["containers"]
    assert side["restartPolicy"] == "Always", "it runs beside the predictor"
    assert predictor["command"] == WORKERS
    variables = {each["name"]: each.get("value") for each in predictor["env"]}
    assert_used(side["args"], predictor["args"], variables["MIRROR"])
    (memory,) = [each["name"] for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory"]
    for each in (side, predictor):
        assert {"name": memory, "mountPath": "/dev/shm"} in each["volumeMounts"]  # noqa: S108
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in each["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_compose_mounts_one_memory_in_the_mirror_and_the_workers(shared: Doc) -> None:
    services = shared["services"]
    for name in ("predictor-1", "predictor-2"):
        assert services[name]["entrypoint"] == WORKERS
        mirrored = services[name]["environment"]["MIRROR"]
        assert_used(services["mirror"]["command"], services[name]["command"], mirrored)
        assert "shared:/dev/shm" in services[name]["volumes"]
    assert "shared:/dev/shm" in services["mirror"]["volumes"]
    assert shared["volumes"]["shared"]["driver_opts"]["type"] == "tmpfs"


def test_the_model_and_its_rows_are_those_that_workers_can_serve(
    deploy: Path, compose: Doc, consumers: Doc, manifests: list[Doc], rendered: dict[str, Doc], shared: Doc
) -> None:
    settings = tomllib.loads((deploy / "kubernetes-shared/deltasync.toml").read_text())
    own = settings.pop("consumers")
    assert own == {"predictors": {key: v for key, v in consumers["predictors"].items() if key != "value_type"}}
    first = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    assert settings == {key: value for key, value in first.items() if key != "consumers"}
    (job,) = [doc for doc in manifests if doc["kind"] == "Job"]
    for before, after in (
        (_arguments(job), _arguments(rendered["Job"])),
        (compose["services"]["trainer"]["command"], shared["services"]["trainer"]["command"]),
    ):
        assert after == [each for each in before if each != "--managed"]
    assert (deploy / shared["configs"]["deltasync"]["file"]).is_file()


def _arguments(job: Doc) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return list(container["args"])
