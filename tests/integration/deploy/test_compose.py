import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deployments import compose_file

Stages = dict[str, list[tuple[str, str]]]


def _option(command: list[str], name: str) -> str:
    joined = [word.split("=", 1)[1] for word in command if word.startswith(f"--{name}=")]
    return joined[0] if joined else command[command.index(f"--{name}") + 1]


def _words(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [word for name, rest in stage if name == instruction for word in rest.split()]


def test_builds_name_stages_and_arguments_of_the_dockerfile(compose: dict[str, Any], stages: Stages) -> None:
    for service in compose["services"].values():
        stage = stages[service["build"]["target"]]
        declared = {word.split("=")[0] for word in _words(stage, "ARG")}
        assert service["build"].get("args", {}).keys() <= declared


def test_one_image_name_is_one_build(compose: dict[str, Any]) -> None:
    builds: dict[str, Any] = {}
    for service in compose["services"].values():
        assert builds.setdefault(service["image"], service["build"]) == service["build"]


def test_named_volumes_exist(compose: dict[str, Any]) -> None:
    mounts = [mount.split(":") for service in compose["services"].values() for mount in service.get("volumes", [])]
    assert {name for name, *_ in mounts} == compose["volumes"].keys()


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml", "compose.monitoring.yaml"])
def test_volumes_that_are_written_are_folders_of_the_images_user(deploy: Path, stages: Stages, name: str) -> None:
    """A new volume gets the owner of the image's folder that it is mounted at; without one it is root's, and these
    containers run as another user, without the right to write there."""
    (made,) = [rest for word, rest in stages["base"] if "install --directory" in rest]
    (user,) = {rest for stage in ("service", "trainer") for word, rest in stages[stage] if word == "USER"}
    assert "--owner {} --group {} ".format(*user.split(":")) in made
    base = compose_file(deploy / "compose.yaml")["services"]
    services = compose_file(deploy / name)["services"]
    # Those of other images are root there, and say so.
    ours = {each: service for each, service in services.items() if each in base or "extends" in service}
    assert all(service["user"] == "0:0" for each, service in services.items() if each not in ours)
    mounts = [mount.split(":") for service in ours.values() for mount in service.get("volumes", [])]
    written = {path for _, path, *mode in mounts if mode != ["ro"]}
    assert written
    assert written <= set(made.split())


def test_what_is_waited_for_is_healthy_or_done(compose: dict[str, Any]) -> None:
    services = compose["services"]
    waits = {name: service["depends_on"] for name, service in services.items() if "depends_on" in service}
    assert waits.keys() == services.keys() - {"access"}
    assert waits["service"] == {"access": {"condition": "service_completed_successfully"}}
    for name in waits.keys() - {"service"}:
        assert waits[name] == {"service": {"condition": "service_healthy"}}
    assert "healthcheck" in services["service"]


def test_containers_are_confined(deploy: Path) -> None:
    documents = [compose_file(path)["services"] for path in sorted(deploy.glob("compose*.yaml"))]
    assert len(documents) == 4
    for services in documents:
        for name, service in services.items():
            if "image" in service and "extends" not in service:
                assert service["read_only"] is True, name
                assert service["cap_drop"] == ["ALL"]
                assert service.get("cap_add", []) in ([], ["DAC_OVERRIDE"])
                assert service["security_opt"] == ["no-new-privileges:true"]
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_published_ports_are_exposed_and_local(compose: dict[str, Any], stages: Stages) -> None:
    ports = {
        name: [port.split(":") for port in service.get("ports", [])]
        for name, service in compose["services"].items()
    }
    assert {inside for _, _, inside in ports["service"]} == set(_words(stages["service"], "EXPOSE"))
    for name in ("predictor-1", "predictor-2"):
        assert [inside for _, _, inside in ports[name]] == [
            _option(compose["services"][name]["command"], "http-port")
        ]
    published = [port for each in ports.values() for port in each]
    assert {address for address, _, _ in published} == {"127.0.0.1"}
    assert len({outside for _, outside, _ in published}) == len(published) == 4


@pytest.mark.parametrize("name", ["trainer", "predictor-1", "predictor-2"])
def test_clients_dial_the_service(compose: dict[str, Any], stages: Stages, name: str) -> None:
    host, port = compose["services"][name]["environment"]["DELTASYNC_SERVICE"].split(":")
    assert host in compose["services"]
    assert port in _words(stages["service"], "EXPOSE")


def test_the_service_is_given_the_configuration_by_its_name(deploy: Path, compose: dict[str, Any]) -> None:
    service = compose["services"]["service"]
    given = {each["target"] for each in service["configs"]}
    assert given == {_option(service["command"], "config"), service["environment"]["DELTASYNC_PROBE_ENDPOINT"]}
    assert all((deploy / each["file"]).is_file() for each in compose["configs"].values())
    assert {each["source"] for each in service["configs"]} == compose["configs"].keys() - {"processes"}


def test_predictors_are_two_replicas_of_the_consumer_of_the_trainers_model(
    compose: dict[str, Any], consumers: dict[str, Any]
) -> None:
    services = compose["services"]
    predictors = [services[name]["command"] for name in services if re.match("predictor", name)]
    (consumer,) = {_option(command, "consumer") for command in predictors}
    assert _option(services["trainer"]["command"], "model") == consumers[consumer]["model"]
    assert {_option(command, "value-type") for command in predictors} == {consumers[consumer]["value_type"]}
    assert all("--managed" in command for command in (services["trainer"]["command"], *predictors))
    assert len({_option(command, "replica") for command in predictors}) == len(predictors) == 2


def _repeated(node: yaml.Node | None) -> Iterator[str]:
    """Keys that are there twice, of which YAML would keep the last in silence."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        yield from {key for key in keys if keys.count(key) > 1}
        for _, value in node.value:
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def test_no_key_of_a_file_in_yaml_is_there_twice(deploy: Path) -> None:
    assert list(_repeated(yaml.compose("a: [{b: 1, b: 2}]", yaml.SafeLoader))) == ["b"]
    files = [path for path in deploy.rglob("*") if path.suffix in {".yaml", ".yml"}]
    assert len(files) >= 7
    for path in files:
        for document in yaml.compose_all(path.read_text(), yaml.SafeLoader):
            assert not list(_repeated(document)), path
