"""Every command line and setting in deploy/ is one that the programs have."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.support.http import routes

from deltasync.base.settings import settings_in
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.service.options import ServiceOptions

Stages = dict[str, list[tuple[str, str]]]
Unit = list[tuple[str, str]]

POLICIES = "sync_service/docs/policies.md"


@pytest.fixture(scope="module")
def cli() -> click.Group:
    group = import_module("deltasync.cli.main").cli
    assert isinstance(group, click.Group)
    return group


@pytest.fixture(scope="module")
def serve(cli: click.Group) -> dict[str, click.Parameter]:
    """The options of `deltasync serve` by name."""
    command = cli.get_command(click.Context(cli), "serve")
    assert command
    return {str(parameter.name): parameter for parameter in command.params}


def _shell_lines(path: Path) -> Iterator[list[str]]:
    for block in re.findall(r"(?s)```sh\n(.*?)```", path.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line)


@pytest.fixture(scope="module")
def lines(
    deploy: Path, stages: Stages, compose: dict[str, Any], containers: list[dict[str, Any]], unit: Unit
) -> dict[str, list[str]]:
    """Each `deltasync` command line, without its first word, by where it stands."""
    image = dict(stages["service"])
    assert json.loads(image["ENTRYPOINT"]) == ["deltasync"]
    found = {"Dockerfile": json.loads(image["CMD"]), "compose.yaml": compose["services"]["service"]["command"]}
    (found["service.yaml"],) = [c["args"] for c in containers if c["image"] == "deltasync-service"]
    program, *found["deltasync.service"] = shlex.split(dict(unit)["ExecStart"])
    assert Path(program).name == "deltasync"
    readme = deploy / "README.md"
    for words in _shell_lines(readme):
        if words[:2] == ["docker", "run"]:
            image_at = next(i for i, word in enumerate(words) if word.startswith("deltasync-service:"))
            found["README.md: " + shlex.join(words)] = words[image_at + 1 :]
        elif words and Path(words[0]).name == "deltasync":
            command = words[1 : words.index(">")] if ">" in words else words[1:]
            found["README.md: " + shlex.join(words)] = command
        elif "exec" in words and "deltasync" in words:
            command_at = len(words) - words[::-1].index("deltasync")
            found["README.md: " + shlex.join(words)] = words[command_at:]
    for line in re.findall(r"`deltasync ([^`]+)`", readme.read_text()):
        found[f"README.md: deltasync {line}"] = shlex.split(line)
    return found


def _check(cli: click.Group, words: list[str]) -> None:
    """Parse as click does, but read no file and start nothing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="deltasync")
    # A group by itself is only spoken of.
    while isinstance(command, click.Group) and words:
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    assert command is not cli
    values, extra, _ = command.make_parser(context).parse_args(words)
    assert not extra
    for parameter in command.params:
        value = values.get(parameter.name or "")
        without = parameter.nargs == -1 and not isinstance(value, list | tuple)  # Which is allowed.
        if parameter.name in values and not without and not isinstance(parameter.type, click.Path | click.File):
            parameter.type_cast_value(context, value)


def test_command_lines_parse(cli: click.Group, lines: dict[str, list[str]]) -> None:
    assert len(lines) >= 8
    for place, words in lines.items():
        try:
            _check(cli, words)
        except click.UsageError as error:
            pytest.fail(f"{place}: {error.format_message()}")


def consumers_in(table: object) -> tuple[ConsumerOptions, ...]:
    (read,) = (each.read for each in settings_in(ServiceOptions) if each.name == "consumers")
    assert read
    consumers: tuple[ConsumerOptions, ...] = read(table, {})
    return consumers


@pytest.mark.parametrize("line", ["serve --no-such-option 1", "no-such-command", "serve --grpc-port high"])
def test_check_refuses_what_is_wrong(cli: click.Group, line: str) -> None:
    with pytest.raises((click.UsageError, AssertionError)):
        _check(cli, line.split())


def test_configuration_has_only_settings_of_serve(deploy: Path, serve: dict[str, click.Parameter]) -> None:
    settings = tomllib.loads((deploy / "kubernetes/deltasync.toml").read_text())
    consumers_in(settings.pop("consumers", {}))
    for key, value in settings.items():
        assert key in serve, f"deltasync.toml: {key} is no option of serve"
        assert isinstance(value, list) == serve[key].multiple
        for one in value if isinstance(value, list) else [value]:
            serve[key].type(one)


def test_examples_of_policies_are_policies(deploy: Path) -> None:
    text = (deploy / "kubernetes/deltasync.toml").read_text()
    commented = text[text.index("# [consumers.") :]
    examples = [re.sub(r"(?m)^# ", "", commented)]
    examples += re.findall(r"(?s)```toml\n(.*?)```", (deploy.parent / POLICIES).read_text())
    policies = [
        each.policy.as_dict()
        for example in examples
        for each in consumers_in(tomllib.loads(example)["consumers"])
        if each.policy
    ]
    assert len(policies) == len(examples) == 2
    # Where all keys are, see tests/unit/cli/test_policy_fields.py.
    assert f"](../{POLICIES})" in (deploy / "README.md").read_text()
    assert POLICIES in text[: text.index(commented)].splitlines()[-1]
    assert [(policy["top_k"], policy["value_type"]) for policy in policies] == [(0.1, "int8")] * 2


def test_variables_are_settings_of_serve(root: Path, deploy: Path, serve: dict[str, click.Parameter]) -> None:
    files = [path for path in deploy.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    used = {name for path in files for name in re.findall(r"\bDELTASYNC_[A-Z_]*[A-Z]\b", path.read_text())}
    of_clients = {"SERVICE", "HTTP", "CA", "CERT", "KEY", "TOKEN_FILE", "ENDPOINT"}
    assert "DELTASYNC_TLS_KEY" in used
    variables = {each.variable for each in settings_in(ServiceOptions)} | {"DELTASYNC_CONFIG"}
    assert used <= variables | {f"DELTASYNC_{name}" for name in of_clients | {"COMMIT"}}


def test_image_exposes_the_default_ports(stages: Stages, serve: dict[str, click.Parameter]) -> None:
    exposed = next(rest for word, rest in stages["service"] if word == "EXPOSE")
    assert exposed.split() == [str(serve[name].default) for name in ("grpc_port", "http_port")]


def _module_lines(compose: dict[str, Any], containers: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Each command line that runs `python -m MODULE` or `torchrun -m MODULE`, from the module on."""
    commands = [s.get("entrypoint", []) + s["command"] for s in compose["services"].values()]
    commands += [container.get("command", []) + container["args"] for container in containers]
    for command in commands:
        if "-m" in command:
            yield command[command.index("-m") + 1 :]


@pytest.mark.parametrize("module", ["deltasync.trainer.example.train", "deltasync.trainer.example.predictor"])
def test_trainer_and_predictor_have_the_options_used(
    compose: dict[str, Any], containers: list[dict[str, Any]], module: str
) -> None:
    used = [words[1:] for words in _module_lines(compose, containers) if words[0] == module]
    assert len(used) >= 2
    help_text = CliRunner().invoke(import_module(module).main, ["--help"]).output
    known = set(re.findall(r"--[a-z][a-z-]*", help_text))
    assert {word.split("=")[0] for words in used for word in words} <= known


@pytest.mark.parametrize("name", ["README.md", "RUNBOOK.md"])
def test_operators_are_sent_to_commands_and_routes_that_there_are(
    deploy: Path, cli: click.Group, name: str
) -> None:
    text = (deploy / name).read_text()
    lines = re.findall(r"`deltasync ([a-z][^`]*)`", text)
    assert lines
    for line in lines:
        command: click.Command | None = cli
        for word in line.split():
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
        assert command, line
        assert name != "RUNBOOK.md" or not isinstance(command, click.Group), f"{line}: which of several commands?"
    gets = {route for kind, route in routes() if kind == "GET"} | {"/ready"}  # Of the example predictor.
    named = re.findall(r"`(/[a-zA-Z][^`]*)`", text)
    assert {each for each in named if not each.startswith(("/etc/", "/var/"))} <= gets
