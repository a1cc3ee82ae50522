"""What commands import: help, and calls of a running service, are there at once."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

import click

from deltasync.cli.main import cli

# From 0.2 s of a core to 4 s.
SLOW = ("fastapi", "numba", "torch", "torchrec")
NOBODY = "http://127.0.0.1:1"
CALLS = [
    ["lag", "predictors", "--service", NOBODY],
    ["consumers", "list", "--service", NOBODY],
    ["consumers", "create", "predictors", "--model", "clicks", "--top-k", "0.1", "--service", NOBODY],
    ["rows", "pending", "--service", NOBODY],
]
# Runs commands one after the other; says of each how it ended, and what has been imported by then.
RUN = f"""
import contextlib, io, json, sys
from deltasync.cli.main import cli

said = []
for arguments in json.loads(sys.argv[1]):
    end = None
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(arguments, standalone_mode=False)
        except Exception as error:
            end = type(error).__name__
    said.append([end, [name for name in {SLOW} if name in sys.modules]])
print(json.dumps(said))
"""


def commands(group: click.Group, *path: str) -> Iterator[list[str]]:
    """All commands and groups."""
    yield [*path]
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield [*path, name]


def ran(calls: list[list[str]]) -> list[tuple[str, str | None, list[str]]]:
    """Each command, how it ended, and what is slow and imported."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(calls)], capture_output=True, text=True, check=True, timeout=60
    )
    said = json.loads(done.stdout)
    return [(" ".join(call), end, names) for call, (end, names) in zip(calls, said, strict=True)]


def test_help_imports_nothing_that_is_slow() -> None:
    calls = [[*path, "--help"] for path in commands(cli)]
    verbs = {entry.name for entry in entry_points(group="deltasync.commands")}
    assert {first for first, *_ in calls} == verbs | {"--help"}
    assert ran(calls) == [(" ".join(call), None, []) for call in calls]


def test_calls_import_nothing_that_is_slow() -> None:
    assert ran(CALLS) == [(" ".join(call), "ServiceUnavailable", []) for call in CALLS]


def test_a_predictor_needs_no_http_library() -> None:
    code = "import sys, deltasync.client; sys.exit('httpx' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
