"""What is saved: formats, and which versions are known in a checkpoint of several ranks."""

import io
from typing import Any

import pytest
import torch

from deltasync.base.errors import InvalidInput
from deltasync.client import Position
from deltasync.trainer.checks import check_format
from deltasync.trainer.run import PublishedVersions, SyncState

BIG = 2**64 - 3  # A seal has 64 bits.


def at(number: int, seal: int) -> Position:
    return Position("h", number, seal)


def known(*versions: tuple[int, int, int]) -> PublishedVersions:
    """Of number, seal and cursor."""
    versions_known = PublishedVersions()
    for number, seal, cursor in versions:
        versions_known.add(at(number, seal), cursor)
    return versions_known


def state(clock: int, position: Position, versions: PublishedVersions) -> dict[str, Any]:
    """As it comes out of a file."""
    file = io.BytesIO()
    torch.save(SyncState(position, versions, None).save({"clock": clock}), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_a_version_is_known_by_its_seal() -> None:
    versions = known((1, BIG, 4), (2, 8, 6))
    assert versions.cursor_at(Position("another name", 1, BIG)) == 4
    assert versions.cursor_at(at(2, 8)) == 6
    assert versions.cursor_at(at(2, 9)) is None, "another past"
    assert versions.cursor_at(at(1, 0)) is None, "without a seal nobody knows"
    assert known((1, 0, 4)).cursor_at(at(1, 0)) is None


def test_the_last_1024_are_kept() -> None:
    versions = known(*((number, 7, number) for number in range(1, 1026)))
    assert versions.cursor_at(at(1, 7)) is None
    assert versions.cursor_at(at(2, 7)) == 2


def test_none_is_known_once_the_clock_has_started_over() -> None:
    versions = known((1, 7, 2**31 - 2), (2, 8, 1))
    assert versions.cursor_at(at(1, 7)) is None
    assert versions.cursor_at(at(2, 8)) == 1


def test_ranks_know_what_all_of_them_do_by_the_clock_that_shows_the_most() -> None:
    states = [
        state(20, at(3, 9), known((1, BIG, 5), (2, 8, 10), (3, 9, 15))),
        state(12, at(2, 8), known((1, BIG, 4), (2, 8, 11))),
    ]
    versions = PublishedVersions.of_all(states)
    assert versions.cursor_at(at(1, BIG)) == min(5, 4 + 8)
    assert versions.cursor_at(at(2, 8)) == min(10, 11 + 8)
    assert versions.cursor_at(at(3, 9)) is None


@pytest.mark.parametrize(
    ("positions", "versions", "expected"),
    [
        ([at(2, 8), at(2, 8)], [known((2, 8, 4)), known((2, 8, 4))], at(2, 8)),
        ([at(2, 8), at(3, 9)], [known((2, 8, 4)), known((2, 8, 4), (3, 9, 5))], at(2, 8)),
        ([at(2, 8), at(3, 9)], [known((2, 8, 4)), known((3, 9, 5))], Position()),
        ([at(2, 0), at(3, 0)], [known(), known()], Position()),
        ([at(2, 0), at(2, 0)], [known(), known()], at(2, 0)),
        ([at(2, 8), Position()], [known((2, 8, 4)), known()], Position()),
    ],
)
def test_a_checkpoint_is_at_the_lowest_version_of_its_ranks(
    positions: list[Position], versions: list[PublishedVersions], expected: Position
) -> None:
    states = [state(9, *each) for each in zip(positions, versions, strict=True)]
    found = SyncState.of_all(states).position
    assert (found, found.seal) == (expected, expected.seal)


# Formats of what was saved: those that are known, and those that are not.


@pytest.mark.parametrize("found", [1, 2, 3])
def test_formats_up_to_the_newest_are_read(found: int) -> None:
    check_format("a state", found, 3)


@pytest.mark.parametrize("found", [4, 10**9])
def test_a_newer_format_is_refused_with_both_numbers_and_a_way_out(found: int) -> None:
    message = f"a state is of format {found}, this version reads 3: update deltasync, or start"
    with pytest.raises(InvalidInput, match=message):
        check_format("a state", found, 3)


@pytest.mark.parametrize("found", [0, -1, 1.0, "1", True, None, b"\0"])
def test_what_is_no_format_is_not_taken_for_one(found: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^a state: format: .* expected a whole number of at least 1$"):
        check_format("a state", found, 3)
