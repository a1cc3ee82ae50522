"""Which versions the newest one builds on after rollbacks."""

from dataclasses import replace
from random import Random

import pytest
from tests.support.seals import sealed

from deltasync.core.position import Position
from deltasync.core.seal import Seal, SealHistory


def history(*rollbacks: int) -> SealHistory:
    """A number of 0 is a version of a trainer, any other one a rollback to that version."""
    return SealHistory(seal(number, to) for number, to in enumerate(rollbacks, 1))


def seal(version: int, to: int) -> Seal:
    return replace(sealed(version, rollback_of=to or None), checksum=1000 + version)


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
