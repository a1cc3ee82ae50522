import itertools

import pytest
from tests.soak.faults.kinds import KINDS, kinds_of
from tests.soak.fleet import fleet_of
from tests.soak.schedule import SoakOptions, schedule

EVERYTHING = kinds_of(fleet_of(small=False, redis=True, storage=True))
GAP = SoakOptions.mean_gap


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert schedule(5, 300, EVERYTHING, GAP) == schedule(5, 300, EVERYTHING, GAP)
    assert schedule(5, 300, EVERYTHING, GAP) != schedule(6, 300, EVERYTHING, GAP)


@pytest.mark.parametrize("seed", range(200))
def test_in_five_minutes_every_kind_comes(seed: int) -> None:
    faults = schedule(seed, 300, EVERYTHING, GAP)
    assert {fault.kind for fault in faults} == set(KINDS)
    times = [fault.at for fault in faults]
    assert times == sorted(times)
    assert 0 < times[0] <= times[-1] <= 300


def test_some_faults_begin_before_the_one_before_them_is_over() -> None:
    faults = schedule(1, 300, EVERYTHING, GAP)
    assert any(later.at < earlier.at + earlier.seconds for earlier, later in itertools.pairwise(faults))


def test_faults_of_what_does_not_run_do_not_come() -> None:
    kinds = set(kinds_of(fleet_of(small=True, redis=False, storage=False)))
    assert set(KINDS) - kinds == {"kill TorchRec rank", "storage hangs"}
