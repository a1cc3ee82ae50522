"""Every row of the table of defects in TorchRec's tracker, `README.md` beside this file, as a test of ours."""

import re
from pathlib import Path

import pytest
from tests.integration.trainer.torchrec_defects.scenarios import SCENARIOS
from tests.support.scenarios import Outcomes, Scenario, parametrized

TABLE = Path(__file__).with_name("README.md").read_text()
SHOWN_BY = {int(row): cell for row, cell in re.findall(r"(?m)^\| (\d+) .*\| (.*) \|$", TABLE)}


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("one"), ranks=1)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return SCENARIOS.played(tmp_path_factory.mktemp("two"), ranks=2)


@pytest.mark.nightly
@parametrized(SCENARIOS, ranks=1)
def test_on_one_rank(of_one_rank: Outcomes, scenario: Scenario) -> None:
    of_one_rank.check(scenario)


@pytest.mark.nightly
@parametrized(SCENARIOS, ranks=2)
def test_on_two_ranks(of_two_ranks: Outcomes, scenario: Scenario) -> None:
    of_two_ranks.check(scenario)


def test_every_row_is_shown() -> None:
    shown: dict[int, set[str]] = {}
    for one in SCENARIOS:
        shown.setdefault(int(one.topic.removeprefix("row")), set()).add(one.play.__module__.rpartition(".")[2])
    assert shown.pop(0) == {"beyond"}
    assert list(SHOWN_BY) == sorted(SHOWN_BY)
    for row, cell in SHOWN_BY.items():
        assert shown.get(row, set()) == set(re.findall(r"`(\w+)`", cell))
        assert row in shown or "](" in cell
    assert {one.ranks for one in SCENARIOS} == {1, 2}
