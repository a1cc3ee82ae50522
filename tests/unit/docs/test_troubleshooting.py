"""The symptoms on the page of troubleshooting are words that the product says."""

import ast
import re
from functools import cache

import pytest
from tests.support.documents import ROOT, document

ROWS = re.findall(
    r"^\| (.*?`.*?) \| .* \| .* \|$", document("sync_service/docs/troubleshooting.md").text, re.MULTILINE
)
SYMPTOMS = [words for row in ROWS for words in re.findall(r"`([^`]+)`", row)]


@cache
def said() -> str:
    """Every text in the sources, one a line."""
    files = [
        path for folder in ("sync_service", "trainer") for path in (ROOT / folder / "deltasync").rglob("*.py")
    ]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return "\n".join(
        node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) >= 25


@pytest.mark.parametrize("symptom", SYMPTOMS)
def test_every_symptom_is_said_by_the_product(symptom: str) -> None:
    # The sources put texts together at punctuation.
    assert [words for words in re.split("…|[:;,] ", symptom) if words not in said()] == []
