"""The tables of promises and of peers name tests that exist; each promise has one in `make test`."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
PROMISES = {str(number) for number in range(1, 16)}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
NIGHTLY = "pytest.mark.nightly"


def lines(document: str, heading: str = "") -> list[str]:
    """The lines below the head of the first table after a heading."""
    text = (TESTS / document).read_text().partition(heading)[2] if heading else (TESTS / document).read_text()
    table = re.search(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert table
    return table[0].splitlines()[2:]


def named(line: str) -> list[tuple[str, str]]:
    """File and function of each test that a line names; `::function` alone is of the file before it."""
    found, file = [], ""
    for name, function in re.findall(r"`([\w/]+\.py)?::(\w+)`", line):
        file = name or file
        found.append((file, function))
    return found


@cache
def functions(file: str) -> dict[str, bool]:
    """The functions of a file, and whether each runs by night only."""
    tree = ast.parse((TESTS / file).read_text())
    whole = any(
        NIGHTLY in ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _nightly(node):
            found |= {each.name: True for each in node.body if isinstance(each, _FUNCTIONS)}
        elif isinstance(node, _FUNCTIONS):
            found.setdefault(node.name, whole or _nightly(node))
    return found


def _nightly(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator says so: of a test, or of a scenario. A parameter that is nightly leaves others."""
    said = map(ast.unparse, node.decorator_list)
    return any(each == NIGHTLY or "nightly=True" in each for each in said)


@pytest.mark.parametrize("line", [*lines("peers.md"), *lines("README.md", "\n## Promises\n")])
def test_every_line_names_tests_that_exist(line: str) -> None:
    assert named(line)
    for file, function in named(line):
        assert function in functions(file), f"{file}::{function}"


@pytest.mark.parametrize("line", lines("README.md", "\n## Promises\n"))
def test_no_promise_is_left_to_the_night(line: str) -> None:
    for file, function in named(line):
        assert not functions(file)[function], f"{file}::{function} runs by night only"


def test_every_promise_has_a_line() -> None:
    assert {line.split("|")[1].strip() for line in lines("README.md", "\n## Promises\n")} >= PROMISES


def test_what_runs_by_night_only_is_known() -> None:
    kinds = {
        file: functions(file)[function]
        for file, function in (
            ("integration/hostile/test_attacks.py", "test_an_attack_leaves_nothing_behind"),
            ("integration/trainer/pipelines/scenarios/programs.py", "any_order_of_actions"),
            ("integration/service/test_kill.py", "test_nothing_acknowledged_is_lost"),
        )
    }
    assert list(kinds.values()) == [True, True, False]
