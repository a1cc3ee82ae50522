"""Which versions the newest one builds on after rollbacks."""

from dataclasses import replace
from random import Random

import pytest
from tests.support.seals import sealed

from deltasync.core.position import Position
from deltasync.core.seal import Seal, SealHistory, rollback_run_id, rolled_back_to


def history(*rollbacks: int) -> SealHistory:
    """A number of 0 is a version of a trainer, any other one a rollback to that version."""
    return SealHistory(seal(number, to) for number, to in enumerate(rollbacks, 1))


def seal(version: int, to: int) -> Seal:
    of_run = sealed(version, run=rollback_run_id(to) if to else "r")
    return replace(of_run, checksum=1000 + version)


def test_ids_of_rollbacks_name_the_version_and_differ() -> None:
    assert rolled_back_to(rollback_run_id(12)) == 12
    assert rollback_run_id(12) != rollback_run_id(12)
    assert rolled_back_to(rollback_run_id(12, accept_any=True)) == 12
    for run in ("r", "rollback", "rollback-to-12", "rollback-to-x-12345678", "rollback-to-12-123456789"):
        assert rolled_back_to(run) is None


def test_a_position_has_the_rows_of_the_newest_rollback_to_it() -> None:
    seals = history(0, 0, 1, 0, 1)
    first = Position("h", 1, 1001)
    assert seals.same_rows(first) == Position("h", 5, 1005)
    assert seals.same_rows(Position("h", 1, 7)) == Position("h", 1, 7), "another version 1"
    assert seals.same_rows(Position("h", 2, 1002)) == Position("h", 2, 1002)
    assert history(0, 0, 1, 2).same_rows(first) == first, "the rollback to it was rolled back"
    assert seals.frozen()[2].at_once
    assert not seals.frozen()[3].at_once


@pytest.mark.parametrize("seed", range(50))
def test_the_newest_version_builds_on_those_that_no_rollback_discarded(seed: int) -> None:
    random, seals, builds_on = Random(seed), SealHistory(), dict[int, set[int]]()
    for version in range(1, 12):
        to = random.randrange(1, version) if version > 1 and random.random() < 0.4 else 0
        seals.append(seal(version, to))
        builds_on[version] = builds_on.get(to or version - 1, set()) | {version}
        discarded = {each for each in range(1, version + 1) if seals.rolled_back_by(each)}
        assert discarded == set(range(1, version + 1)) - builds_on[version]
