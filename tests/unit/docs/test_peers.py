"""What others lose rows by: each line names tests that there are."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
LINES = [line for line in (TESTS / "peers.md").read_text().splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("line", LINES)
def test_every_line_names_tests_that_there_are(line: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
    assert named
    for file, function in named:
        assert re.search(rf"^(async )?def {function}\(", (TESTS / file).read_text(), re.MULTILINE), function
