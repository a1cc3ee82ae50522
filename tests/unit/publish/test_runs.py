import pytest
from tests.support.seals import sealed

from deltasync.core.position import Position, resume
from deltasync.core.seal import Seal
from deltasync.publish.runs import MAX_AHEAD_NS, Run, continues, may_publish

HEAD = sealed(5, run="b")
NOW = 10**18
LATER = NOW + MAX_AHEAD_NS + 7 * 10**9


@pytest.mark.parametrize(
    ("run", "current", "yes", "said"),
    [
        (Run("a", 1, 2), None, True, "run a is the first"),
        (Run("a", 1, 2), Run("a", 1, 2), True, "run a is publishing"),
        (Run("a", 1, 2), Run("a", 1, 4), False, "run a has 4 ranks, this one says 2"),
        (Run("b", 2, 2), Run("a", 1, 4), True, "run b takes over from run a"),
        (Run("b", 1, 2), Run("a", 1, 2), False, "run b began before run a"),
        (Run("b", 1, 2), Run("a", 2, 2), False, "which has taken over: stop it"),
        (Run("b", NOW + MAX_AHEAD_NS, 2), Run("a", 2, 2), True, "run b takes over from run a"),
        (Run("b", LATER, 2), None, False, "run b began 307 s ahead of the service's clock: set the clocks right"),
        (Run("b", LATER, 2), Run("a", 2, 2), False, "run b began 307 s ahead"),
        # The service's own clock has been set back.
        (Run("a", LATER, 2), Run("a", LATER, 2), True, "run a is publishing"),
        (Run("b", NOW, 2), Run("a", LATER, 2), True, "run b takes over from run a"),
    ],
)
def test_who_may_publish(run: Run, current: Run | None, yes: bool, said: str) -> None:
    decision = may_publish(run, current, NOW)
    assert decision.yes is yes
    assert said in decision.reason


@pytest.mark.parametrize(
    ("run", "claim", "head", "yes", "said"),
    [
        ("b", Position("h", 5), None, False, "nothing is published yet"),
        ("b", Position(), HEAD, True, "run b published version 5 itself"),
        ("b", Position("h", 4), HEAD, True, "run b published version 5 itself"),
        # A copy of the data directory was restored.
        ("b", Position("h", 6), HEAD, False, "holds version 6, the newest one is only 5"),
        ("b", Position("other", 6), HEAD, False, "holds history other, the service history h"),
        ("b", Position("", 6), HEAD, False, "holds version 6, the newest one is only 5"),
        ("b", Position("other", 5), HEAD, False, "holds history other, the service history h"),
        ("c", Position("other", 5), HEAD, False, "holds history other, the service history h"),
        ("c", Position("h", 5), HEAD, True, "the run holds version 5"),
        ("c", Position("", 5), HEAD, False, "the run holds version 5, the newest one is 5"),
        ("c", Position("h", 4), HEAD, False, "holds version 4, the newest one is 5"),
        ("c", Position("h", 6), HEAD, False, "holds version 6, the newest one is only 5"),
        ("c", Position(), HEAD, False, "holds no version, the newest one is 5"),
    ],
)
def test_whether_a_run_continues(run: str, claim: Position, head: Seal | None, yes: bool, said: str) -> None:
    decision = continues(Run(run, 1, 2), claim, "h", head)
    assert decision.yes is yes
    assert said in decision.reason


@pytest.mark.parametrize(
    ("held", "head", "yes", "said"),
    [
        (Position(), 5, False, "holds nothing"),
        (Position("h", 0), 5, False, "holds nothing"),
        (Position("other", 3), 5, False, "history other"),
        (Position("", 3), 5, False, "history ,"),
        (Position("h", 6), 5, False, "the newest one is only 5"),
        (Position("h", 5), 5, True, "holds version 5"),
        (Position("h", 1), 5, True, "holds version 1"),
    ],
)
def test_whether_a_replica_goes_on(held: Position, head: int, yes: bool, said: str) -> None:
    decision = resume(held, "h", head)
    assert decision.yes is yes
    assert said in decision.reason
