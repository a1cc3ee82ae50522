"""The page of operators names each state, part of a cut and card of the page as the program does."""

import re
from typing import get_args

from tests.support.documents import ROOT, document

from deltasync.status.records import State

PAGE = document("sync_service/docs/operating.md").text
SCRIPTS = {path.name: path.read_text() for path in (ROOT / "sync_service/deltasync/api/page").glob("*.js")}


def _first_cells(heading: str) -> list[str]:
    section = PAGE.partition(f"\n### {heading}\n")[2].partition("\n##")[0]
    _, _, *cells = re.findall(r"(?m)^\| (.*?) \|", section)
    return [cell.strip("`") for cell in cells]


def test_each_state_of_a_consumer_has_a_row() -> None:
    assert sorted(_first_cells("States of a consumer")) == sorted(get_args(State))


def test_the_cards_are_those_of_the_page() -> None:
    assert _first_cells("The page") == re.findall(r'card\("(.*?)"\)', SCRIPTS["overview.js"])


def test_the_headings_are_those_of_the_page() -> None:
    section = PAGE.partition("Below follow ")[2].partition("\n\n")[0].partition(". ")[0]
    headings = re.findall(r'"(.*?)"', section)
    assert len(headings) == 5
    assert [each for each in headings if f'"{each}"' not in SCRIPTS["overview.js"]] == []


def test_the_parts_of_a_cut_are_those_of_the_page() -> None:
    [parts] = re.findall(r"PARTS = \[(.*)\]", SCRIPTS["draw.js"])
    assert _first_cells("Where a cut's time goes") == re.findall(r'"(\w+)"', parts)
