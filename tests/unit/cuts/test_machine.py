"""The state machine of a cut keeps its promises, whatever happens in whatever order."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from deltasync.base.errors import Contradiction, RunRefused, StorageFailed, Superseded
from deltasync.core.tables import TableSpec
from deltasync.cuts.admission import Run
from deltasync.cuts.machine import (
    MOST_TRIES,
    Answer,
    BeginCut,
    CutAbandoned,
    CutApplied,
    CutDurable,
    Drop,
    EndStreams,
    Event,
    LogFull,
    PartClosed,
    Phase,
    RankJoined,
    RankLeft,
    RoomMade,
    RowsArrived,
    RunFailed,
    Seal,
    SealFailed,
    Skip,
    State,
    Transition,
    enough,
    first_cut_fits,
    next_state,
    whole_bytes,
)

TABLES = [TableSpec("user", 10, 4)]
CAPACITY = 1000
RUNS = [
    Run("first", 1, 2),
    Run("second", 2, 1),
    Run("rollback", 3, 1, rollback_of=1),
    Run("third", 4, 3),
]


class Ranks:
    """Ranks, a log and a model that do what the machine says, and check each of its promises.

    Attributes:
        versions: the run and step of each version.
        answers: what the ranks that closed a part of each cut were told, by the cut's number.
    """

    def __init__(self) -> None:
        self.state = State()
        self.versions = list[tuple[str, int]]()
        self.answers = dict[int, list[object]]()
        self.waiting = dict[int, int]()  # Ranks that wait for an answer, by the cut's number.
        self.logged = set[int]()  # Cuts of which the log has rows, without a seal.
        self.durable = set[int]()
        self.applied = set[int]()
        self.closed = dict[int, dict[int, int]]()  # The stream that closed each rank's part, by the cut's number.
        self.streams = dict[int, tuple[Run, int]]()
        self.newest_stream = dict[tuple[str, int], int]()
        self.published_by = list[str]()

    def do(self, event: Event) -> Transition:
        before, after = self.state, next_state(self.state, event)
        if after.error:
            assert str(after.error)
            assert isinstance(event, LogFull) or (after.state, after.actions) == (before, ())
        self.state = after.state
        for action in after.actions:
            self._act(action)
        cut = self.state.cut
        assert self.logged <= ({cut.number} if cut else set()), "the log has rows of one unsealed cut at most"
        if isinstance(event, RankLeft) and not cut and not self.state.connected:
            assert not self.state.tables, "the next run may announce others"
        return after

    def _act(self, action: object) -> None:
        match action:
            case BeginCut(cut):
                assert not self.logged
                assert cut.version == len(self.versions) + 1
                self.logged.add(cut.number)
                self.closed[cut.number] = {}
            case Drop(cut, error):
                assert cut.number not in self.durable, "a version is never dropped"
                self.logged.remove(cut.number)
                self._answer(cut.number, error)
            case Seal():
                assert self.state.cut
                assert self.state.cut.phase is Phase.SEALING
                self._check_whole()
            case Answer():
                number = max(self.durable)
                assert number in self.applied
                self._answer(number, len(self.versions))
            case EndStreams():
                assert not self.state.streams or self.state.run
            case Skip():
                pass

    def _check_whole(self) -> None:
        cut = self.state.cut
        assert cut
        closed = self.closed[cut.number]
        assert sorted(closed) == list(range(cut.run.world_size)), "every rank has closed its part"
        assert {self.streams[stream][0] for stream in closed.values()} == {cut.run}, "of one run"

    def _answer(self, number: int, answer: object) -> None:
        count = self.waiting.pop(number, 0)
        self.answers.setdefault(number, []).extend([answer] * count)

    # What may happen.

    def join(self, run: Run, rank: int, gone_seconds: float | None = None) -> Transition:
        stream = len(self.streams)
        self.streams[stream] = (run, rank)
        joined = self.do(RankJoined(run, rank, stream, {table.name: table for table in TABLES}, 10, gone_seconds))
        if not joined.error:
            self.newest_stream[run.id, rank] = stream
            if run.id not in self.published_by:
                self.published_by.append(run.id)
        return joined

    def send(self, stream: int, step: int, *, close: bool) -> Transition:
        run, rank = self.streams[stream]
        received = self.do(RowsArrived(rank, stream, step))
        if received.error:
            return received
        assert self.state.run == run
        assert self.newest_stream[run.id, rank] == stream, "only the newest stream of a rank counts"
        if Skip() in received.actions:
            cut = self.state.cut
            done = self.versions and self.versions[-1] == (run.id, step)
            assert done or (cut and cut.step == step and rank in self.closed[cut.number])
            return received
        if close:
            assert self.state.cut
            number = self.state.cut.number
            self.closed[number][rank] = stream
            self.waiting[number] = self.waiting.get(number, 0) + 1
            return self.do(PartClosed(rank, stream, step))
        return received

    def seal(self) -> None:
        """The log has the seal."""
        cut = self.state.cut
        if cut and cut.phase is Phase.SEALING:
            self.logged.remove(cut.number)
            self.durable.add(cut.number)
            self.versions.append((cut.run.id, cut.step))
            self.do(CutDurable(cut.number))

    def fail(self) -> None:
        """The log refuses the seal."""
        if self.state.cut and self.state.cut.phase is Phase.SEALING:
            self.do(SealFailed(self.state.cut.number, StorageFailed("the disk is full")))

    def apply(self) -> None:
        cut = self.state.cut
        if cut and cut.phase is Phase.APPLYING:
            self.applied.add(cut.number)
            self.do(CutApplied(cut.number))

    def fill(self, log_bytes: int, *, refused: bool, cut: int | None = None) -> Transition:
        current = self.state.cut
        number, step = (current.number, current.step) if current else (0, 0)
        return self.do(LogFull(cut or number, step, log_bytes, CAPACITY, TABLES, refused))


def anything(ranks: Ranks, random: Random) -> None:
    """One event, of any kind."""
    streams = list(ranks.streams)
    choices: list[Callable[[], Any]] = [
        lambda: ranks.join(
            run := random.choice(RUNS), random.randrange(run.world_size), random.choice([None, 99.0])
        ),
        ranks.seal,
        ranks.apply,
        ranks.seal,
        ranks.apply,
        ranks.fail,
        lambda: ranks.do(CutAbandoned("all ranks of its run have left")),
        lambda: ranks.do(RoomMade()),
        lambda: ranks.fill(random.choice([10, 600, 2000]), refused=random.random() < 0.5),
        lambda: ranks.do(RunFailed(random.choice(RUNS))),
    ]
    if streams:
        stream = random.choice(streams[-6:])
        step = random.randrange(1, 8)
        choices += 8 * [lambda: ranks.send(stream, step, close=random.random() < 0.7)]
        choices += [lambda: ranks.do(RankLeft(stream))]
    random.choice(choices)()


@pytest.mark.parametrize("seed", range(400))
def test_events_in_any_order_break_no_promise(seed: int) -> None:
    ranks, random = Ranks(), Random(seed)
    for _ in range(150):
        anything(ranks, random)
    ranks.do(CutAbandoned("the service ends"))
    ranks.seal()
    ranks.apply()
    assert not ranks.waiting, "each closed part got an answer"
    assert not ranks.logged
    assert not ranks.state.cut
    for number, answers in ranks.answers.items():
        assert len(set(map(id, answers))) <= 1, "all ranks of a cut are told the same"
        assert all(isinstance(each, int) == (number in ranks.applied) for each in answers)
    for (run, step), (next_run, next_step) in zip(ranks.versions, ranks.versions[1:], strict=False):
        assert run != next_run or step < next_step


def test_random_orders_reach_every_kind_of_end() -> None:
    """Otherwise the test above would show little."""
    versions, ends = 0, set[str]()
    for seed in range(400):
        ranks, random = Ranks(), Random(seed)
        for _ in range(150):
            anything(ranks, random)
        versions += len(ranks.versions)
        for answers in ranks.answers.values():
            ends.update("version" if isinstance(each, int) else str(each).split(":")[0][:20] for each in answers)
    assert versions > 400
    assert len(ends) > 8
    assert {"version", "the disk is full"} <= ends


def joined(*ranks_of: Run) -> Ranks:
    """All ranks of some runs, one run after another."""
    ranks = Ranks()
    for run in ranks_of:
        for rank in range(run.world_size):
            assert not ranks.join(run, rank).error
    return ranks


def test_a_cut_is_sealed_once_the_last_rank_has_closed_its_part() -> None:
    ranks = joined(RUNS[0])
    assert ranks.send(0, 5, close=True).actions == ()
    assert ranks.send(1, 5, close=True).actions == (Seal(),)
    ranks.seal()
    assert not ranks.answers, "replicas cannot get it yet"
    ranks.apply()
    assert ranks.answers == {1: [1, 1]}


def test_a_later_step_takes_the_rows_of_an_abandoned_cut_along() -> None:
    ranks = joined(RUNS[0])
    ranks.send(0, 5, close=True)
    ranks.send(1, 6, close=False)
    assert [str(each) for each in ranks.answers[1]] == ["cut of step 5: abandoned for the cut of step 6"]
    assert isinstance(ranks.send(0, 5, close=True).error, Contradiction)


def test_a_new_stream_of_a_rank_begins_its_part_anew() -> None:
    ranks = joined(RUNS[0])
    ranks.send(0, 5, close=False)
    ranks.join(RUNS[0], 0)
    assert isinstance(ranks.send(0, 5, close=True).error, Superseded)
    assert ranks.send(2, 5, close=False).actions == ()
    assert ranks.state.cut
    assert ranks.state.cut.parts == {0: 2}


def test_a_rank_that_reports_another_start_of_its_run_is_refused() -> None:
    ranks = joined(RUNS[0])
    ranks.send(0, 5, close=True)
    refused = ranks.join(Run("first", 9, 2), 1)
    assert isinstance(refused.error, RunRefused)
    assert "run first began at 1, this rank reports 9" in str(refused.error)
    assert ranks.send(1, 5, close=True).actions == (Seal(),)


def test_an_answer_that_was_lost_is_given_again() -> None:
    ranks = joined(RUNS[1])
    ranks.send(0, 5, close=True)
    assert ranks.send(0, 5, close=True).actions == (Skip(),)
    ranks.seal()
    ranks.apply()
    assert ranks.send(0, 5, close=True).actions == (Skip(),)
    assert "already published" in str(ranks.send(0, 4, close=True).error)


def test_a_run_that_takes_over_ends_a_cut_unless_it_is_being_sealed() -> None:
    arriving = joined(RUNS[0])
    arriving.send(0, 5, close=True)
    taken_over = arriving.join(RUNS[1], 0)
    assert [type(each) for each in taken_over.actions] == [Drop, EndStreams]
    sealing = joined(RUNS[1])
    sealing.send(0, 5, close=True)
    assert [type(each) for each in sealing.join(RUNS[3], 0).actions] == [EndStreams]
    assert "is being sealed" in str(sealing.send(1, 6, close=True).error)
    sealing.seal()
    sealing.apply()
    assert sealing.versions == [("second", 5)]
    assert sealing.join(RUNS[1], 0).error, "a run that was superseded never returns"


def test_the_run_before_a_rollback_waits_for_its_end() -> None:
    ranks = joined(RUNS[1], RUNS[2])
    assert ranks.state.rolling_back
    assert "is being rolled back to version 1" in ranks.join(RUNS[1], 0).error.detail  # type: ignore[union-attr]
    ranks.do(RunFailed(RUNS[2]))
    assert not ranks.join(RUNS[1], 0).error


def test_a_failed_rollback_gives_the_model_back_to_the_run_before_it() -> None:
    """Even if that took over after the rollback was prepared."""
    ranks = joined(RUNS[0], RUNS[1], RUNS[2])
    ranks.do(RunFailed(RUNS[2]))
    assert ranks.state.run == RUNS[1]
    assert "which has taken over" in str(ranks.join(RUNS[0], 0).error)


def test_a_rollback_that_fails_during_an_earlier_seal_gives_back() -> None:
    ranks = joined(RUNS[1])
    ranks.send(0, 5, close=True)
    ranks.join(RUNS[2], 0)
    ranks.do(RunFailed(RUNS[2]))
    assert ranks.state.run == RUNS[1]
    ranks.seal()
    ranks.apply()
    assert ranks.versions == [("second", 5)]


def test_a_rollback_does_not_fail_while_its_own_cut_is_sealed() -> None:
    ranks = joined(RUNS[1], RUNS[2])
    ranks.send(1, 5, close=True)
    ranks.do(RunFailed(RUNS[2]))
    ranks.seal()
    ranks.apply()
    assert (ranks.state.run, ranks.versions) == (RUNS[2], [("rollback", 5)])


def test_a_cut_that_never_fits_is_dropped_unless_the_log_decides() -> None:
    ranks = joined(RUNS[1])
    ranks.send(0, 5, close=False)
    full = ranks.fill(2000, refused=False)
    assert isinstance(full.error, Contradiction)
    assert [type(each) for each in full.actions] == [Drop]
    ranks.send(0, 6, close=True)
    late = ranks.fill(2000, refused=True)
    assert late.error
    assert late.actions == (), "the seal is on its way to the log"


def test_a_large_cut_that_the_log_refuses_at_each_seal_never_fits() -> None:
    """Although its bytes alone would: each time checkpoints have made room before, and it is sent again."""
    ranks, errors = joined(RUNS[1]), list[str]()
    for _ in range(MOST_TRIES + 1):
        ranks.do(RoomMade())
        ranks.send(0, 5, close=True)
        full = ranks.fill(600, refused=True)
        assert full.actions == (), "its seal decides"
        errors.append(type(full.error).__name__)
        ranks.fail()
        assert ranks.state.cut is None
    assert errors == [*["NoneType"] * MOST_TRIES, "Contradiction"]
    ranks.do(RoomMade())
    ranks.send(0, 6, close=True)
    assert not ranks.fill(600, refused=True).error, "another cut"
    assert not ranks.fill(200, refused=True).error, "others fill the log"


def test_refusals_count_only_after_checkpoints_made_room() -> None:
    ranks = joined(RUNS[1])
    for _ in range(MOST_TRIES + 1):
        ranks.send(0, 5, close=True)
        assert not ranks.fill(600, refused=True).error
        ranks.fail()


def test_a_cut_that_does_not_fit_is_refused_with_the_size_to_set() -> None:
    table = TableSpec("t", 1000, 10)
    needed = whole_bytes([table])
    assert needed == 1000 * (8 + 40 + 8)
    assert first_cut_fits([table], needed).yes
    refused = first_cut_fits([table], needed - 1)
    assert not refused.yes
    for number in (needed, needed - 1, enough(needed)):
        assert str(number) in refused.reason
