import pytest

from sync_service.log import Seal
from sync_service.runs import Run, continues, may_publish, resume
from sync_service.tables import Position
from tests.support.seals import sealed

HEAD = sealed(5, run="b")


@pytest.mark.parametrize(
    ("run", "current", "yes", "said"),
    [
        (Run("a", 1, 2), None, True, "run a is the first"),
        (Run("a", 1, 2), Run("a", 1, 2), True, "run a is publishing"),
        (Run("a", 1, 2), Run("a", 1, 4), False, "run a has 4 ranks, this one says 2"),
        (Run("b", 2, 2), Run("a", 1, 4), True, "run b takes over from run a"),
        (Run("b", 1, 2), Run("a", 1, 2), False, "run b began before run a"),
        (Run("b", 1, 2), Run("a", 2, 2), False, "which has taken over: stop it"),
    ],
)
def test_who_may_publish(run: Run, current: Run | None, yes: bool, said: str) -> None:
    decision = may_publish(run, current)
    assert decision.yes is yes
    assert said in decision.reason


@pytest.mark.parametrize(
    ("run", "claim", "head", "yes", "said"),
    [
        ("b", Position("h", 5), None, False, "nothing is published yet"),
        ("b", Position(), HEAD, True, "run b published version 5 itself"),
        ("b", Position("other", 5), HEAD, False, "holds history other, the service history h"),
        ("c", Position("other", 5), HEAD, False, "holds history other, the service history h"),
        ("c", Position("h", 5), HEAD, True, "the run holds version 5"),
        ("c", Position("", 5), HEAD, False, "the run holds version 5, the newest one is 5"),
        ("c", Position("h", 4), HEAD, False, "holds version 4, the newest one is 5"),
        ("c", Position("h", 6), HEAD, False, "holds version 6, the newest one is 5"),
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
