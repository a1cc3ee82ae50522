"""What commands print: also names that terminals and encodings do not take, and where nothing can be written."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import deltasync
from tests.support.deployments import COMMAND
from tests.support.fleet import Trainer, follow, wait_until_in_sync
from tests.support.server import TOKEN, RunningService

from deltasync.client import Endpoint, NumpyTarget, TableSpec

# It clears the screen, begins a line of its own, turns the direction of writing, and is no text in UTF-8.
HOSTILE = "\x1b[2J\nforged: all is well\r\u202e\udc80"
TABLE = TableSpec("us\x1ber\nforged\u202e", 4, 2)
LISTS = [
    *(
        ["status"],
        ["lag"],
        ["lag", "predictors"],
        ["cuts"],
        ["events"],
        ["consumers", "list"],
        ["tables", "list"],
    ),
    *(["replicas", "list", "predictors"], ["checkpoints"], ["processes"], ["rows", "pending"]),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One with a table of a hostile name, a replica, and a delete that nobody meets. Shared."""
    with (
        RunningService(tmp_path_factory.mktemp("hostile") / "data") as service,
        Trainer(service.grpc, [TABLE]) as trainer,
        follow(service, "predictors", "p", NumpyTarget()),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        run("rows", "delete", "clicks", TABLE.name, "1", "--service", service.http)
        yield service


def run(*arguments: str) -> str:
    """All that a command prints."""
    code, out, err = deltasync(*arguments, token=TOKEN)
    assert code == 0, err
    return out + err


def check(printed: str) -> None:
    lines = printed.split("\n")
    assert "forged" in printed
    assert all(line.isprintable() for line in lines), printed
    assert not [line for line in lines if line.startswith("forged")]


def test_the_name_of_a_table_commands_no_terminal(service: RunningService) -> None:
    check(run("tables", "list", "--service", service.http))
    check(run("lag", "predictors", "--service", service.http))
    check(run("tail", "predictors", "--count", "1", "--service", service.grpc))
    check(run("verify", "predictors", "--service", service.http))
    check(run("rows", "delete", "clicks", TABLE.name, "1", "--service", service.http))
    check(run("rows", "pending", "--service", service.http))
    code, _, err = deltasync("rows", "delete", "clicks", f"no {TABLE.name}", "1", http=service.http, token=TOKEN)
    assert code == 1
    check(err)


def test_columns_stand_under_their_titles_whatever_names_have(service: RunningService) -> None:
    titles, line = run("tables", "list", "--service", service.http).splitlines()
    assert line[titles.index("kind") :].startswith("embedding")


@pytest.mark.parametrize("command", LISTS, ids=" ".join)
def test_nothing_that_a_service_answers_commands_a_terminal(
    service: RunningService, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Endpoint.ask

    def answer(self: Endpoint, method: str, path: str, *rest: Any) -> Any:
        return hostile(ask(self, method, path, *rest))

    monkeypatch.setattr(Endpoint, "ask", answer)
    check(run(*command, "--service", service.http))
    assert run(*command, "--json", "--service", service.http).isascii()


def hostile(answer: Any) -> Any:
    """An answer of which all texts are hostile, but for addresses and for policies, which are read."""
    if isinstance(answer, dict):
        kept = {name for name, value in answer.items() if name == "http" or (name == "policy" and value)}
        return {name: value if name in kept else hostile(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [hostile(each) for each in answer]
    return answer + HOSTILE if isinstance(answer, str) else answer


@pytest.mark.parametrize(
    "command",
    [
        ["lag", "\udcff"],
        ["replicas", "list", "\udcff"],
        ["cuts", "\udcff"],
        ["tail", "\udcff"],
        ["verify", "\udcff"],
        ["consumers", "create", "\udcff", "--model", "clicks"],
        ["consumers", "pause", "predictors", "--reason", "\udcff"],
        ["replicas", "forget", "predictors", "\udcff"],
        ["models", "delete", "\udcff"],
        ["tables", "delete", "clicks", "\udcff"],
        ["rows", "delete", "clicks", "\udcff", "1"],
        ["move", "clicks", "--to", "\udcff"],
        ["backup", "/dev/null/\udcff"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_argument_that_is_no_text_is_an_error_of_one_line(running: RunningService, command: list[str]) -> None:
    at = running.grpc if command[0] == "tail" else running.http
    code, out, err = deltasync(*command, "--service", at, token=TOKEN)
    errors = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert (code, out, len(errors)) == (1, "", 1)
    assert r"\udcff" in errors[0] or "half of a character" in errors[0]
    assert "Traceback" not in err


def in_a_shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash that has the command as `deltasync`, with its output buffered unless told otherwise."""
    command = f'deltasync() {{ {COMMAND[0]} -m deltasync "$@"; }}; {line}'
    settings = {**os.environ, "PYTHONUNBUFFERED": "", **environment}
    return subprocess.run(["bash", "-c", command], capture_output=True, env=settings, timeout=60, check=False)  # noqa: S607


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error_of_one_line(unbuffered: str) -> None:
    done = in_a_shell("deltasync serve --help > /dev/full", PYTHONUNBUFFERED=unbuffered)
    said = b"Error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    # The reader is gone before the command begins.
    done = in_a_shell("exec 3> >(true); wait $!; deltasync serve --help >&3")
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_an_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "roles.toml").write_text('[certificates."é\u044f"]\nroles = ["read"]\n')
    done = in_a_shell(f"deltasync tokens list --roles {tmp_path}/roles.toml", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "certificate  é\\u044f" in done.stdout.decode("latin-1")
