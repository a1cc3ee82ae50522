"""Who may publish, and from where a run goes on, also where the clocks of trainers differ."""

from pathlib import Path
from typing import Literal

import pytest
from tests.support.local_service import join, opened, publish, send
from tests.support.seals import sealed
from tests.support.wire import WHOLE, full_part, random_rows

from deltasync.base.errors import Contradiction, DeltasyncError, RunRefused, ServiceUnavailable
from deltasync.core.position import Position
from deltasync.core.seal import Seal, SealHistory
from deltasync.cuts.admission import MAX_AHEAD_NS, Run, continues, may_go_on, may_publish

HEAD = sealed(5, run="b")
NOW = 10**18
LATER = NOW + MAX_AHEAD_NS + 7 * 10**9


@pytest.mark.parametrize(
    ("run", "current", "yes", "said"),
    [
        (Run("a", 1, 2), None, True, "run a is the first"),
        (Run("a", 1, 2), Run("a", 1, 2), True, "run a is publishing"),
        (Run("a", 1, 2), Run("a", 1, 4), False, "run a has 4 ranks, this rank reports 2"),
        (Run("b", 2, 2), Run("a", 1, 4), True, "run b takes over from run a"),
        (Run("b", 1, 2), Run("a", 1, 2), False, "run b began before run a"),
        (Run("b", 1, 2), Run("a", 2, 2), False, "which has taken over: stop run"),
        (Run("b", NOW + MAX_AHEAD_NS, 2), Run("a", 2, 2), True, "run b takes over from run a"),
        (
            Run("b", LATER, 2),
            None,
            False,
            "run b began 307 s ahead of the service's clock: synchronise the clocks",
        ),
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
    ("gone", "earlier", "error", "said"),
    [
        (None, (), Contradiction, "run b began before run a, which has taken over: stop run b"),
        (59.0, (), ServiceUnavailable, "once its ranks have been gone for 60 s, so far 59 s"),
        (60.0, (), None, "run b follows run a, whose ranks have been gone for 60 s"),
        (60.0, ("b",), RunRefused, "run b began before run a, which has taken over: stop run b ("),
    ],
)
def test_a_run_whose_clock_is_an_hour_behind_follows_one_that_is_gone(
    gone: float | None, earlier: tuple[str, ...], error: type[DeltasyncError] | None, said: str
) -> None:
    hour = 3600 * 10**9
    decision = may_publish(Run("b", NOW - hour, 1), Run("a", NOW, 1), NOW, gone_seconds=gone, earlier=earlier)
    assert (None if decision.yes else decision.error) is error
    assert said in decision.reason


A, B = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("run", "current", "earlier", "yes"),
    [
        (Run(f"{A}+1", 2, 1), Run(B, 5, 1), [A], False),  # It was resharded, and has another id.
        (Run(f"{A}+2", 9, 1), Run(f"{B}+1", 5, 1), [f"{A}+1", B], False),  # The clock of the later one is behind.
        (Run(A, 1, 1), Run(f"{A}+1", 2, 1), [A], False),
        (Run(f"{A}+2", 3, 1), Run(f"{A}+1", 2, 1), [A], True),  # Nobody else has taken over.
        (Run(f"{A}+1", 2, 1), Run(B, 5, 1), [], True),
        (Run("b", NOW, 1), Run("a", 1, 1), ["b"], False),  # Whatever its clock says.
        # Ids that others have chosen say nothing of each other.
        (Run("job+3", 2, 1), Run("else", 5, 1), ["job", "job+1"], True),
        (Run(f"{A}+01", 2, 1), Run("else", 5, 1), [A], True),
    ],
)
def test_a_trainer_that_was_taken_over_stays_out_whatever_runs_it_begins(
    run: Run, current: Run, earlier: list[str], yes: bool
) -> None:
    decision = may_publish(run, current, NOW, gone_seconds=1e9, earlier=earlier)
    assert (decision.yes, decision.error) == (yes, RunRefused)
    assert yes or "which has taken over: stop run" in decision.reason


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
    ("run", "claim", "seal", "since", "said"),
    [
        ("c", Position("h", 3, seal=7), 7, 3, "holds version 3, and gets the ids of later rows"),
        ("c", Position("before the restore", 3, seal=7), 7, 3, "holds version 3, and gets the ids of later rows"),
        ("c", Position("before the restore", 5, seal=7), 7, None, "the run holds version 5, the newest one"),
        ("b", Position("h", 3, seal=7), 7, None, "run b published version 5 itself"),
        ("c", Position("h", 3, seal=7), 8, False, "version 3, which differs from that version of this history"),
        ("b", Position("h", 3, seal=7), 8, False, "version 3, which differs from that version of this history"),
        ("c", Position("h", 5, seal=7), 8, False, "version 5, which differs from that version of this history"),
        # Which past it is, nobody can tell.
        ("c", Position("h", 3), 8, False, "holds version 3, the newest one is 5"),
        ("c", Position("h", 3, seal=7), 0, False, "holds version 3, the newest one is 5"),
        ("c", Position("h", 6, seal=7), 0, False, "the newest one is only 5"),
    ],
)
def test_from_which_version_a_run_goes_on(
    run: str, claim: Position, seal: int, since: int | Literal[False] | None, said: str
) -> None:
    decision = continues(Run(run, 1, 2), claim, "h", HEAD, seal, takes_changes=True)
    assert (decision.yes, decision.since) == (since is not False, since or None)
    assert said in decision.reason
    if since:  # A client that cannot be told.
        assert not continues(Run(run, 1, 2), claim, "h", HEAD, seal).yes


def test_who_is_refused_learns_of_whom_and_what_of_itself() -> None:
    ours = Run("a", 10**18, 2, "process 12 of box-1")
    theirs = Run("b", 10**18 + 10**9, 2, "process 7 of box-2")
    said = may_publish(ours, theirs, NOW).reason
    assert "run a: process 12 of box-1, begun 2001-09-09T01:46:40Z" in said
    assert "run b: process 7 of box-2, begun 2001-09-09T01:46:41Z" in said
    assert "run a: unknown process" in may_publish(theirs, Run("a", 1, 1), NOW).reason


HOUR = 3600 * 10**9


async def test_a_trainer_that_comes_back_on_a_machine_an_hour_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait for that hour, and the run before cannot come back, also after a restart."""
    async with opened(tmp_path) as service:
        crashed = await publish(service, run="crashed", started=2 * HOUR)
        with pytest.raises(Contradiction, match="run behind began before run crashed"):
            await join(service, run="behind", started=HOUR)
        crashed.end("it has crashed")
        with pytest.raises(ServiceUnavailable, match="run behind may follow run crashed, which began"):
            await join(service, run="behind", started=HOUR)
        monkeypatch.setattr("deltasync.cuts.admission.GONE_SECONDS", 0.0)
        behind = await join(service, run="behind", started=HOUR)
        await send(behind, full_part(1, random_rows(1), WHOLE))
        behind.end("it has gone")
        with pytest.raises(Contradiction, match="run crashed published before run behind"):
            await join(service, run="crashed", started=2 * HOUR)
    async with opened(tmp_path) as service:
        with pytest.raises(Contradiction, match="run crashed published before run behind"):
            await join(service, run="crashed", started=2 * HOUR)
        await join(service, run="later", started=2 * HOUR)


async def test_after_a_restart_the_run_that_published_has_time_to_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await publish(service, run="here", started=2 * HOUR)
    async with opened(tmp_path) as service:
        with pytest.raises(ServiceUnavailable, match="so far 0"):
            await join(service, run="behind", started=HOUR)
        await join(service, run="here", started=2 * HOUR)
        with pytest.raises(Contradiction, match="run behind began before run here"):
            await join(service, run="behind", started=HOUR)


ROLLED_BACK = [sealed(1), sealed(2), sealed(3), sealed(4, rollback_of=2)]
BY_ANY = [sealed(1), sealed(2), sealed(3, rollback_of=1, accepts_any=True)]
GOES_ON = [*ROLLED_BACK, sealed(5, run="good")]


@pytest.mark.parametrize(
    ("seals", "claim", "start_over", "refused"),
    [
        (ROLLED_BACK, Position("h", 4), False, ""),
        (ROLLED_BACK, Position("h", 2), False, ""),
        (ROLLED_BACK, Position("h", 1), False, ""),
        (
            ROLLED_BACK,
            Position("h", 3),
            False,
            "goes on from version 3, but the model was rolled back to version 2",
        ),
        (
            ROLLED_BACK,
            Position("h", 3),
            True,
            "goes on from version 3, but the model was rolled back to version 2",
        ),
        (
            ROLLED_BACK,
            Position(),
            False,
            "no version, as without a DeltaSync state, but the model was rolled back",
        ),
        (ROLLED_BACK, Position("other", 1), False, "version 1 of another history, but the model was rolled back"),
        (ROLLED_BACK, Position("h", 5), False, "SyncOptions(start_over=True)"),
        (ROLLED_BACK, Position(), False, "deltasync models rollback NAME --version 2 --accept-any"),
        (ROLLED_BACK, Position(), True, ""),
        (BY_ANY, Position(), False, ""),
        (BY_ANY, Position("h", 2), False, "goes on from version 2, but the model was rolled back to version 1"),
        (GOES_ON, Position(), False, ""),
        (GOES_ON, Position("h", 3), False, "goes on from version 3, but the model was rolled back to version 2"),
        ([*GOES_ON, sealed(6, rollback_of=5)], Position("h", 2), False, ""),
        ([*GOES_ON, sealed(6, rollback_of=5)], Position(), False, "was rolled back to version 5"),
        ([], Position(), False, ""),
        (ROLLED_BACK[:3], Position(), False, ""),
    ],
)
def test_after_a_rollback_only_runs_that_build_on_its_version_go_on(
    seals: list[Seal], claim: Position, start_over: bool, refused: str
) -> None:
    decision = may_go_on(Run("b", 9, 1), claim, "h", SealHistory(seals), start_over=start_over)
    assert (decision.yes, decision.error) == (not refused, RunRefused)
    assert refused in decision.reason


@pytest.mark.parametrize(
    ("claim", "seal", "takes_changes", "yes", "since"),
    [
        (Position(A, 5, HEAD.checksum), HEAD.checksum, True, True, 5),
        (Position(A, 3, 7), 7, True, True, 3),
        (Position(A, 5, HEAD.checksum), HEAD.checksum, False, False, None),
        (Position(A, 6, 9), 0, True, False, None),
    ],
)
def test_a_run_that_continues_must_also_send_the_rows_that_damage_has_cost(
    claim: Position, seal: int, takes_changes: bool, yes: bool, since: int | None
) -> None:
    lacks = "2 rows of table 'user' (3 to 4)"
    decision = continues(Run("a", 1, 1), claim, A, HEAD, seal, takes_changes=takes_changes, lacks=lacks)
    assert (decision.yes, decision.since) == (yes, since)
    assert (lacks in decision.reason) is (claim.number <= 5)
