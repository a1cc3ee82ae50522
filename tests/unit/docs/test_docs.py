"""The documents say what is true: the reference is that of the code, and links, options and blocks exist."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner
from starlette.routing import Route
from tests.attacks.families import ATTACKS
from tests.support.documents import DOCUMENTS, EVERYTHING, README, ROOT, Document
from tests.support.metrics import METRICS
from tests.support.reference import FOLDER, PAGES, page

from deltasync.api.application import create_app
from deltasync.base import errors
from deltasync.cli.main import cli
from deltasync.wire.errors import grpc_code, http_errors

VOCABULARY = (
    *("model", "table", "rank", "shard", "step", "cut", "part", "version", "history", "head"),
    *("consumer", "policy", "view", "release", "replica", "offset", "lag"),
)
PUBLIC = ("client", "trainer.sync", "trainer.tracking", "trainer.pipelines")
# Others than these have no blocks that a test could not run.
SHOWN_ONLY = {"console", "json", "mermaid", "text", "toml", "sh"}

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


def _flags(command: click.Command) -> set[str]:
    with command.make_context(command.name, [], resilient_parsing=True) as context:
        params = context.command.get_params(context)
    return {flag for option in params if isinstance(option, click.Option) for flag in option.opts}


def _command_lines(text: str) -> Iterator[tuple[str, str]]:
    """Each `deltasync` or `make` command in a text: the verb, and the rest of its line."""
    yield from re.findall(r"(?:deltasync|make) (\w+)((?: [^`\n]*)?)", text)


@each_document
def test_options_of_commands_exist(document: Document) -> None:
    context = click.Context(cli)
    for name, rest in _command_lines(document.text.replace("\\\n", " ")):
        command = cli.get_command(context, name)
        if command:
            for flag in re.findall(r"(?<![\w-])(--[a-z-]+)", rest.split("#")[0]):
                known = _flags(command) | {
                    f for sub in getattr(command, "commands", {}).values() for f in _flags(sub)
                }
                assert flag in known, f"deltasync {name} {flag}"


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_that_of_the_code(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text() == page(name), "run `make docs`"


def test_the_reference_has_every_route_and_every_metric() -> None:
    """What dashboards, alerts and programs are built on is listed apart in `METRICS`, and in the routes."""
    app = create_app(Mock(), Mock(), Mock())  # Its routes are not called.
    routes = {*app.openapi()["paths"], *(each.path for each in app.routes if type(each) is Route)}
    assert set(re.findall(r"`(?:GET|PUT|POST|DELETE) (/[^`]*)`", page("http"))) == routes
    listed = set(re.findall(r"`(deltasync_\w+)`", page("metrics")))
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in METRICS} == listed


def test_options_of_the_torchrun_entry_exist() -> None:
    main = importlib.import_module("deltasync.trainer.example.train").main
    section = (ROOT / "trainer" / "README.md").read_text().partition("\n## train.py\n")[2].partition("\n## ")[0]
    flags = set(re.findall(r"(?<![\w-])(--[a-z-]+)", section)) - {"--nproc-per-node"}
    assert flags
    assert flags <= _flags(main)


@each_document
def test_every_row_of_a_table_has_as_many_cells_as_its_head(document: Document) -> None:
    for table in re.findall(
        r"(?:^\|.*\n)+", re.sub(r"```.*?```", "", document.text, flags=re.DOTALL), re.MULTILINE
    ):
        head, *rows = (re.sub(r"`[^`]*`", "", line).count("|") for line in table.splitlines())
        assert {head, *rows} == {head}, table


@each_document
def test_every_make_target_exists(document: Document) -> None:
    targets = _targets()
    for target in re.findall(r"(?:`|^\$ )make ([a-z]+)", document.text, re.MULTILINE):
        assert target in targets, target


def test_every_make_target_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in _targets():
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), target


def _targets() -> list[str]:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    return phony[1].split()


def test_the_page_about_security_names_every_attack() -> None:
    section = (ROOT / "sync_service/docs/security.md").read_text().partition("\n## Attacks\n")[2]
    assert [each.name for each in ATTACKS.values() if each.says not in section] == []


def test_the_vocabulary_is_defined() -> None:
    assert [word for word in VOCABULARY if f"**{word}** " not in EVERYTHING] == []


def test_the_table_of_errors_is_that_of_the_code() -> None:
    section = (ROOT / "protos" / "README.md").read_text().partition("\n## Errors\n")[2]
    kinds = [(getattr(errors, name), status) for status, names in http_errors().items() for name in names]
    known = {(grpc_code(kind()).name, str(status), kind.__name__) for kind, status in kinds}
    documented = set(re.findall(r"^\| `([A-Z_]+)` \| (\d+) \| `(\w+)` \|", section, re.MULTILINE))
    assert documented == known | {("INTERNAL", "500", "DeltasyncError")}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: str) -> None:
    for name in importlib.import_module(f"deltasync.{module}").__all__:
        assert f"`{name}`" in EVERYTHING, name


@each_document
def test_links_lead_somewhere(document: Document) -> None:
    for path, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", document.text):
        target = document.path.parent / path if path else document.path
        assert target.exists(), path
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{path}{anchor}"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_paths_in_tables_exist(document: Document) -> None:
    for name in re.findall(
        r"^\| `((?:protos|sync_service|trainer|deploy|tests)(?:/[^`]*)?)` \|", document.text, re.MULTILINE
    ):
        assert (ROOT / name).exists(), name


@each_document
def test_every_python_block_is_run(document: Document) -> None:
    shown = {block.language for block in document.blocks() if block.name is None}
    assert shown <= SHOWN_ONLY


@each_document
def test_shell_blocks_can_be_pasted(document: Document) -> None:
    for block in document.blocks():
        if block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                assert not line.startswith("$ ")
                assert shlex.split(line, comments=True)


def test_the_lines_that_install_a_trainer_name_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locks = (ROOT / "requirements.lock", *(ROOT / "deploy/locks").glob("torch-c*.lock"))
    versions = dict(re.findall(r"(?m)^(torch|torchrec)==([\d.]+)", "".join(lock.read_text() for lock in locks)))
    needed = {re.split("[<>=]", each)[0] for each in project["dependency-groups"]["torchrec-runtime"]}
    [lines] = [block.code for block in README.blocks() if "torch==" in block.code]
    torch, rest, torchrec = lines.splitlines()
    assert torch == f"pip install torch=={versions['torch']}"
    assert {name.partition("==")[0] for name in rest.split()[3:]} == needed
    assert torchrec.split()[3:] == [f"{name}=={versions['torchrec']}" for name in ("torchrec", "fbgemm-gpu-cpu")]


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


@each_document
def test_nothing_is_left_to_be_filled_in(document: Document) -> None:
    assert not re.findall(r"\b[A-Z]+_(?:OUTPUT|SECONDS)\b|TODO|FIXME", document.text)
