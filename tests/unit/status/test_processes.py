"""The list of processes while leases expire."""

import itertools
from collections.abc import Sequence

import pytest

from deltasync.base.errors import Owner
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import Owners
from deltasync.status.overview import process_statuses

ME, OTHER = Member("a", "a:1", "http://a"), Member("b", "b:1", "http://b")


class Expiring(Owners):
    """Process `a`, which sees the lease of `b` expire at the given look at the clock."""

    def __init__(self, look: int) -> None:
        super().__init__(ME)
        self._looks, self._look = itertools.count(), look

    def _alive(self) -> bool:
        return next(self._looks) < self._look

    def models(self) -> Sequence[str]:
        return ["clicks"]

    def owner_of(self, _model: str) -> Owner | None:
        return OTHER.owner() if self._alive() else None

    def processes(self) -> Sequence[Member]:
        return [ME, OTHER] if self._alive() else [ME]

    def gone(self) -> Sequence[Member]:
        return [] if self._alive() else [OTHER]


@pytest.mark.parametrize("look", range(4))
def test_processes_and_models_are_listed_once_while_a_lease_expires(look: int) -> None:
    lines = process_statuses(Expiring(look), [])
    assert [line.process for line in lines] == ["a", "b"]
    assert [model for line in lines for model in (*line.models, *line.unowned)] == ["clicks"]
