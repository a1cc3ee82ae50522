"""The docs say what is true: every command, setting, route and metric is in them, and nothing else is."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from deltasync.cli.main import cli
from deltasync.cli.serve import serve

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
DESIGN_WORDS = (
    "model",
    "table",
    "shard",
    "step",
    "cut",
    "part",
    "version",
    "history",
    "consumer",
    "release",
    "replica",
)


def test_every_command_is_in_the_readme() -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        assert f"`deltasync {name}" in README, name


def _flags(command: click.Command) -> set[str]:
    return {flag for option in command.params if isinstance(option, click.Option) for flag in option.opts}


def test_every_setting_of_serve_is_in_the_readme_and_no_other() -> None:
    documented = set(re.findall(r"^\| `(--[a-z-]+)", README, re.MULTILINE))
    assert documented == _flags(serve) - {"--config", "--help", "-h"}


def test_options_in_the_readmes_commands_exist() -> None:
    context = click.Context(cli)
    for name, rest in re.findall(r"(?:deltasync|make) (\w+)((?: [^`\n]*)?)", README):
        command = cli.get_command(context, name)
        if command:
            for flag in re.findall(r"(--[a-z-]+)", rest.split("#")[0]):
                known = _flags(command) | {
                    f for sub in getattr(command, "commands", {}).values() for f in _flags(sub)
                }
                assert flag in known, f"deltasync {name} {flag}"


def test_every_make_target_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    for target in phony[1].split():
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target
    for target in re.findall(r"(?:`|\$ )make ([a-z]+)", README):
        assert target in phony[1].split(), target


@pytest.mark.parametrize("word", DESIGN_WORDS)
def test_the_vocabulary_is_defined(word: str) -> None:
    assert f"**{word}**" in README


def test_files_the_readme_points_to_exist() -> None:
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path
    for cell in re.findall(r"^\| (`(?:protos|sync_service|trainer)/.*?) \|", README, re.MULTILINE):
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", cell):
            top = name.startswith(("protos/", "sync_service/", "trainer/"))
            path = (ROOT / name) if top else folder / name
            folder = (ROOT / name.split("/")[0]) if top else folder
            assert list(path.parent.glob(path.name)) if "*" in name else path.exists(), name


def test_help_of_every_command_names_its_options() -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command
        assert command.help, name
        output = CliRunner().invoke(command, ["--help"]).output
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[0] in output
                assert option.help, f"{name} {option.opts[0]}"


def test_nothing_is_left_to_be_filled_in() -> None:
    assert not re.findall(r"\b[A-Z]+_(?:OUTPUT|SECONDS)\b|TODO|FIXME", README)
