import pytest
from tests.soak.recovery import Happened, Receipts, Recovery, recovery, steps_back

S = 10**9
FAULT = Happened("kill service", 10 * S, 12 * S, ["a", "b"])
# Releases that two replicas have: when each was applied, and when its step had ended.
CASES = {
    "the last replica counts, from when the fault was undone": (
        [(9, 8), (13, 11)],
        [(9, 8), (15.5, 14)],
        Recovery(3.5, "b"),
    ),
    "a step that ended before the fault shows nothing": (
        [(13, 9.9), (14, 10.5)],
        [(12.5, 11)],
        Recovery(2.0, "a"),
    ),
    "who has gone on before it was undone took no time": ([(11, 10.5)], [(11.5, 11)], Recovery(0.0, "")),
    "who goes on with older steps has not recovered": ([(13, 11)], [(13, 9)], Recovery(None, "b")),
    "nor has who has nothing": ([(13, 11)], [], Recovery(None, "b")),
    "an older version after a newer one takes nothing back": ([(13, 11), (14, 5)], [(13, 11)], Recovery(1.0, "a")),
}


@pytest.mark.parametrize(("a", "b", "found"), CASES.values(), ids=CASES)
def test_replicas_recover_from_a_fault(
    a: list[tuple[float, float]], b: list[tuple[float, float]], found: Recovery
) -> None:
    receipts = {
        name: Receipts([round(at * S) for at, _ in pairs], [round(step * S) for _, step in pairs])
        for name, pairs in (("a", a), ("b", b))
    }
    assert recovery(FAULT, receipts) == found


def test_a_fault_that_touches_nobody_is_over_at_once() -> None:
    assert recovery(Happened("x", 0, S, []), {}) == Recovery(0.0, "")


def test_an_earlier_version_of_the_same_history_is_a_step_back() -> None:
    lines = [("a", 1, 5), ("a", 2, 7), ("b", 1, 3), ("a", 3, 6), ("a", 4, 7), ("b", 2, 3)]
    found = steps_back(
        [{"history": each, "number": number, "version": version} for each, number, version in lines]
    )
    assert found == ["number 3: version 6 after 7"]
