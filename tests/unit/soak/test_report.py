"""A soak is sound only if nothing at all is wrong."""

import io
from typing import Any

import pytest
from rich.console import Console
from tests.soak.report import print_report, sound

SOUND: dict[str, Any] = {
    "versions_lost": 0,
    "rows_lost": 0,
    "replicas_equal": True,
    "differing": {},
    "mixed_versions": [],
    "steps_back": [],
    "not_recovered": [],
    "problems": [],
    "leftovers": [],
    "tracebacks": [],
    "troubles": [],
    "missed": ["kill service: commit: nothing was killed before commit"],
}
WRONG: dict[str, Any] = {
    "versions_lost": 1,
    "rows_lost": 1,
    "replicas_equal": False,
    "differing": {"whole-numpy-0": {"users": 1}},
    "mixed_versions": ["table 'users' has rows of steps [1, 2] in step 2"],
    "steps_back": ["whole-numpy-0: number 3: version 6 after 7"],
    "not_recovered": ["kill service: whole-numpy-0"],
    "problems": ["checkpoints: m/data/1-000000 is damaged at byte 0"],
    "leftovers": ["checkpoints/m/data/strange"],
    "tracebacks": ["service.log: ValueError"],
    "troubles": ["service ended with status 1: ValueError"],
}


FIGURES: dict[str, Any] = {
    "seconds": 40.0,
    "seed": 3,
    "faults": {"kill service": 2, "fsck": 0},
    "versions": 1234,
    "reconnects": 5,
    "bytes_resent": {"trainers": 1_500_000, "replicas": 0},
    "memory": {"service": 227_000_000},
    "directory_bytes": 1_000_000,
    "directory_bytes_most": 2_000_000,
    "recover_seconds": {"p50": 1.0, "p99": 2.0, "max": 3.0},
    "logs": "somewhere",
}


def printed(report: dict[str, Any]) -> str:
    said = io.StringIO()
    print_report(report, Console(file=said, width=300))
    return said.getvalue()


def test_a_person_sees_that_all_is_well_although_a_moment_did_not_come() -> None:
    assert sound(SOUND)
    said = printed(SOUND | FIGURES)
    assert "2 faults in 40 s, seed 3" in said
    assert "\nversions        1,234\n" in said
    assert "\nrows lost       0\n" in said
    assert said.endswith("\nsound           yes\n")


@pytest.mark.parametrize("what", WRONG)
def test_one_failed_check_fails_the_soak_and_names_the_place_to_look(what: str) -> None:
    assert not sound(SOUND | {what: WRONG[what]})
    said = printed(SOUND | FIGURES | {what: WRONG[what]})
    assert f"\n{what}" in said or f"\n{what.replace('_', ' ')}" in said or what == "differing"
    assert said.endswith("\nsound           NO: somewhere has the logs and journals\n")
