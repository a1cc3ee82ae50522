import re
from pathlib import Path
from typing import Any

import pytest

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


def test_named_volumes_exist_and_hold_the_image_data(compose: dict[str, Any], stages: Stages) -> None:
    mounts = [mount.split(":") for service in compose["services"].values() for mount in service.get("volumes", [])]
    assert {name for name, _ in mounts} == compose["volumes"].keys()
    assert {path for _, path in mounts} == set(_words(stages["service"], "VOLUME"))


def test_waited_for_services_have_a_health_check(compose: dict[str, Any]) -> None:
    waits = [s["depends_on"] for s in compose["services"].values() if "depends_on" in s]
    assert len(waits) == len(compose["services"]) - 1
    for name in {name for wait in waits for name in wait}:
        assert "healthcheck" in compose["services"][name]


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
    host, port = _option(compose["services"][name]["command"], "service").split(":")
    assert host in compose["services"]
    assert port in _words(stages["service"], "EXPOSE")


def test_the_service_is_given_the_configuration_by_its_name(deploy: Path, compose: dict[str, Any]) -> None:
    service = compose["services"]["service"]
    (given,) = service["configs"]
    assert _option(service["command"], "config") == given["target"]
    assert (deploy / compose["configs"][given["source"]]["file"]).is_file()


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
