from tests.soak.recovery import Happened, Receipts, Recovery, recovery, steps_back

S = 10**9
FAULT = Happened("kill service", 10 * S, 12 * S, ["a", "b"])


def receipts(*pairs: tuple[float, float]) -> Receipts:
    """Of releases: when each was applied, and when its step had ended."""
    return Receipts([round(at * S) for at, _ in pairs], [round(step * S) for _, step in pairs])


def test_the_last_replica_counts_from_when_the_fault_was_undone() -> None:
    found = {"a": receipts((9, 8), (13, 11)), "b": receipts((9, 8), (15.5, 14))}
    assert recovery(FAULT, found) == Recovery(3.5, "b")


def test_a_version_whose_step_ended_before_the_fault_shows_nothing() -> None:
    found = {"a": receipts((13, 9.9), (14, 10.5)), "b": receipts((12.5, 11))}
    assert recovery(FAULT, found) == Recovery(2.0, "a")


def test_who_has_gone_on_before_the_fault_was_undone_took_no_time() -> None:
    found = {"a": receipts((11, 10.5)), "b": receipts((11.5, 11))}
    assert recovery(FAULT, found) == Recovery(0.0, "")


def test_who_never_goes_on_has_not_recovered() -> None:
    assert recovery(FAULT, {"a": receipts((13, 11)), "b": receipts((13, 9))}) == Recovery(None, "b")
    assert recovery(FAULT, {"a": receipts((13, 11)), "b": receipts()}) == Recovery(None, "b")


def test_an_older_version_after_a_newer_one_takes_nothing_back() -> None:
    found = {"a": receipts((13, 11), (14, 5)), "b": receipts((13, 11))}
    assert recovery(FAULT, found).seconds == 1.0


def test_a_fault_that_touches_nobody_is_over_at_once() -> None:
    assert recovery(Happened("x", 0, S, []), {}) == Recovery(0.0, "")


def test_an_earlier_version_of_the_same_history_is_a_step_back() -> None:
    lines = [("a", 1, 5), ("a", 2, 7), ("b", 1, 3), ("a", 3, 6), ("a", 4, 7), ("b", 2, 3)]
    found = steps_back(
        [{"history": each, "number": number, "version": version} for each, number, version in lines]
    )
    assert found == ["number 3: version 6 after 7"]
