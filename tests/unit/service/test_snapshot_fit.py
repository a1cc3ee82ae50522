"""How a snapshot goes with what a log has."""

import pytest

from deltasync.service.snapshot_fit import Fit, LogEnd, fitness
from deltasync.snapshots.manifest import Manifest


def manifest(first: int, version: int, seal: int) -> Manifest:
    return Manifest(
        head={}, model="m", history="h", first=first, version=version, seal=seal, made_unix_ns=1, id="i", tables=[]
    )


PAST = {1: 11, 2: 12, 3: 13, 4: 14}


@pytest.mark.parametrize(
    ("version", "seals", "cut", "fit"),
    [
        (3, PAST, 0, Fit.FITS),
        (3, PAST, 3, Fit.FITS),
        (4, PAST, 2, Fit.FITS),
        (2, PAST, 3, Fit.GAP),
        (4, {1: 11, 2: 12}, 0, Fit.AHEAD),
        (4, {}, 0, Fit.AHEAD),
        (4, {1: 11, 2: 99}, 0, Fit.FORKED),
        (3, {1: 11, 2: 12, 3: 99, 4: 98}, 0, Fit.FORKED),
        (2, {4: 14, 5: 15}, 2, Fit.FITS),
    ],
)
def test_it_fits_is_ahead_forked_or_leaves_a_gap(version: int, seals: dict[int, int], cut: int, fit: Fit) -> None:
    found = fitness(manifest(1, version, PAST[version]), PAST, LogEnd(seals, cut))
    assert found.fit is fit
    assert f"version {version}" in found.reason
