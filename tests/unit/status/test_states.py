"""The page and the command know each state, and which of them needs somebody first, alike."""

import json
import re
from importlib.resources import files
from typing import get_args

from deltasync.cli.lag import _HOLDING
from deltasync.cli.text_table import urgency
from deltasync.status.lag import State

STATES = set(get_args(State))


def words_of(name: str) -> list[str]:
    """A list of words of the page's."""
    text = (files("deltasync.api") / "page" / "text.js").read_text()
    found = re.search(rf"const {name} = (?:new Set\()?(\[[^\]]*\])", text)
    assert found
    return list(json.loads(found[1]))


def test_the_page_and_the_command_have_the_same_order_of_all_states() -> None:
    order = words_of("ORDER")
    assert set(order) == STATES
    assert order == sorted(STATES, key=urgency)


def test_no_state_is_misspelt() -> None:
    assert {*words_of("GOOD"), *words_of("FINE")} | {"failed", "damaged", "away"} == STATES
    assert _HOLDING <= STATES
