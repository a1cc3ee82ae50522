"""Where the time of cuts goes: beside a plain list of what happened."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.core import cut_times as module
from deltasync.core.cut_times import KEPT_CUTS, CutTimes, RecentCuts, way_to_service

NOW = 10**15


def cuts(count: int) -> RecentCuts:
    recent = RecentCuts()
    for version in range(1, count + 1):
        recent.add(CutTimes(sealed(version), NOW, {"gather": 0.1, "send": 0.2, "seal": 0.0, "log": 0.3}))
    return recent


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_each_replica_counts_once_for_each_version_that_it_gets(acks: list[tuple[str, int, int]]) -> None:
    recent, wanted = cuts(8), dict[tuple[str, int], int]()
    for consumer, before, upto in acks:
        recent.deliver(consumer, before, upto, NOW)
        for version in range(before + 1, upto + 1):
            wanted[consumer, version] = wanted.get((consumer, version), 0) + 1
    found = {
        (consumer, cut.seal.version): each.replicas
        for cut in recent.newest()
        for consumer, each in cut.deliveries.items()
    }
    assert found == wanted


def test_a_version_shows_its_slowest_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = cuts(1)
    for sent, now in ((1.0, 1.5), (3.0, 3.25), (2.0, 2.1)):
        monkeypatch.setattr(module, "steady_ns", lambda now=now: NOW + int(now * 1e9))
        recent.deliver("c", 0, 1, NOW + int(sent * 1e9))
    (cut,) = recent.newest()
    found = cut.deliveries["c"]
    assert (found.replicas, found.release, found.ack) == (3, 3.0, 0.25)


def test_versions_of_before_a_stream_do_not_count() -> None:
    recent = cuts(2)
    recent.add(CutTimes(sealed(3), NOW + 10))
    recent.deliver("c", 0, 3, NOW + 20, begun_ns=NOW + 5)
    assert [cut.seal.version for cut in recent.newest() if cut.deliveries] == [3]


def test_only_the_last_ones_are_kept_and_all_are_counted() -> None:
    recent = cuts(KEPT_CUTS + 5)
    assert [each.seal.version for each in recent.newest(2)] == [KEPT_CUTS + 5, KEPT_CUTS + 4]
    assert len(recent.newest()) == KEPT_CUTS
    assert sum(recent.durations["log"].read()[0]) == KEPT_CUTS + 5
    recent.note_applied(KEPT_CUTS + 5)
    recent.note_applied(KEPT_CUTS + 5)  # Again, after an error.
    assert sum(recent.durations["apply"].read()[0]) == 1


@given(st.integers(0, 2**63), st.integers(-(2**62), 2**62))
def test_clocks_that_differ_make_no_part_negative(gather: int, arrived: int) -> None:
    found = way_to_service(gather, arrived)
    assert all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(max(0, arrived) / 1e9)
