"""What becomes of a cut, from its first rows until replicas can get it: a pure state machine.

The ranks of one run publish a model. Each sends its part of the cut after a step:

    no cut ─ rows ─► ARRIVING ─ all parts are closed ─► SEALING ─ durable ─► APPLYING ─ applied ─► no cut
                        │                                  │
                        └ a later step or run, no room     └ the log refuses it
                                          └────► dropped ◄─────┘

What this page promises:

- A version has the rows of all ranks of one run after the same step, or does not exist.
- A part whose end was accepted gets exactly one answer: the version once it is durable and applied, or an error.
- Until the log has the seal, nothing counts: the cut is dropped whole, and its rows come again with a later one.
- From then on nothing can drop it, and its ranks are answered once replicas can get it.
- Whatever is refused changes nothing here, and says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, DeltasyncError, Superseded
from deltasync.core.tables import DIGEST_TYPE, TableSpec
from deltasync.cuts.admission import Run, may_publish

# A cut does not fit if the full log refuses it this number of times, each time after checkpoints freed space.
MOST_TRIES = 3
# Number of earlier runs to remember.
EARLIER_RUNS = 1_000
_MIB = 1 << 20


class Phase(Enum):
    """How far a cut has come."""

    ARRIVING = auto()  # Its ranks send their parts.
    SEALING = auto()  # All parts are closed. The log may refuse it.
    APPLYING = auto()  # It is durable, and a version.


@dataclass(frozen=True)
class CutState:
    """The cut under way. `number` counts cuts, because a later cut may have the same version and step.

    `parts` names the stream that sends each rank's part; `closed` are the ranks that have sent all of it.
    """

    number: int
    version: int
    step: int
    run: Run
    parts: Mapping[int, int] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    phase: Phase = Phase.ARRIVING


@dataclass(frozen=True)
class Sealed:
    """The newest version: its number, and the run and step that it came from. Version 0: there is none."""

    version: int = 0
    run: str = ""
    step: int = 0


@dataclass(frozen=True)
class Refusals:
    """How often in a row a full log has refused the cut of a step, each time after checkpoints had freed space."""

    step: int | None = None
    tries: int = 0
    room_made: bool = False

    def after(self, step: int, log_bytes: int, capacity: int) -> "Refusals":
        """Count one more. A small cut does not count: other data fills the log, and the cut will fit later."""
        again = self.room_made and step == self.step and log_bytes > capacity // 4
        return Refusals(step, self.tries + 1 if again else 0)


@dataclass(frozen=True)
class State:
    """The run that publishes a model, and its cut.

    Attributes:
        run: the run that publishes; None before the first one.
        before: the run that published before it, which goes on if this one is a rollback and fails.
        earlier: ids of the runs before it, oldest first. None of them may return.
        streams: the newest stream of each rank of the run.
        connected: the streams among them that have not ended.
        tables: the tables that its ranks announced, by name.
        cuts: number of cuts that were begun.
        full: the cut that the full log refused last.
    """

    run: Run | None = None
    before: Run | None = None
    earlier: tuple[str, ...] = ()
    streams: Mapping[int, int] = field(default_factory=dict)
    connected: frozenset[int] = frozenset()
    tables: Mapping[str, TableSpec] = field(default_factory=dict)
    newest: Sealed = Sealed()
    cut: CutState | None = None
    cuts: int = 0
    full: Refusals = Refusals()

    @property
    def rolling_back(self) -> bool:
        """Whether a rollback has taken the model over and has not published its version yet."""
        return self.run is not None and self.run.rollback_of is not None and self.newest.run != self.run.id


# Events.


@dataclass(frozen=True)
class RankJoined:
    """A rank has opened a stream, and announced tables.

    `gone_seconds`: seconds since the last rank of the present run left; None while one is connected.
    """

    run: Run
    rank: int
    stream: int
    tables: Mapping[str, TableSpec]
    now_unix_ns: int
    gone_seconds: float | None = None


@dataclass(frozen=True)
class RowsArrived:
    """A rank's stream has rows of its part of the cut after a step, or the end of that part."""

    rank: int
    stream: int
    step: int


@dataclass(frozen=True)
class PartClosed:
    """A rank's part of the cut after a step is whole. It comes after a `RowsArrived` that was not skipped."""

    rank: int
    stream: int
    step: int


@dataclass(frozen=True)
class RankLeft:
    """A stream has ended."""

    stream: int


@dataclass(frozen=True)
class CutAbandoned:
    """The cut under way ends if its parts still arrive: its ranks, its model or one of its tables have gone."""

    reason: str


@dataclass(frozen=True)
class LogFull:
    """The rows of a cut need `log_bytes` of a log with room for `capacity`. `refused`: the log refused some."""

    cut: int
    step: int
    log_bytes: int
    capacity: int
    tables: Sequence[TableSpec]
    refused: bool


@dataclass(frozen=True)
class RoomMade:
    """Checkpoints have freed as much of the log as possible."""


@dataclass(frozen=True)
class SealFailed:
    """A complete cut could not be sealed."""

    cut: int
    error: Exception


@dataclass(frozen=True)
class CutDurable:
    """The log has the seal of a cut."""

    cut: int


@dataclass(frozen=True)
class CutApplied:
    """Replicas can get a cut, or the service ends and the next start applies it."""

    cut: int


@dataclass(frozen=True)
class RunFailed:
    """A rollback has failed: unless its cut is on its way into the log, the run before it publishes again."""

    run: Run


Event = (
    RankJoined
    | RowsArrived
    | PartClosed
    | RankLeft
    | CutAbandoned
    | LogFull
    | RoomMade
    | SealFailed
    | CutDurable
    | CutApplied
    | RunFailed
)


# Actions.


@dataclass(frozen=True)
class EndStreams:
    """Another run publishes: the streams of the one before are over. `superseded` is the reason, to report."""

    superseded: str = ""


@dataclass(frozen=True)
class BeginCut:
    """Begin a cut."""

    cut: CutState


@dataclass(frozen=True)
class Skip:
    """Ignore the rows: this rank's part is already whole, in the cut under way or in the newest version."""


@dataclass(frozen=True)
class Seal:
    """Seal the cut, and apply it."""


@dataclass(frozen=True)
class Drop:
    """Remove the cut from the log, and tell its ranks the error."""

    cut: CutState
    error: Exception


@dataclass(frozen=True)
class Answer:
    """Tell the ranks of the cut its version."""


Action = EndStreams | BeginCut | Skip | Seal | Drop | Answer


@dataclass(frozen=True)
class Transition:
    """The state after an event, what must be done, why, and the error for the sender if the event is refused."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
    error: DeltasyncError | None = None


def next_state(state: State, event: Event) -> Transition:
    """The transition for an event."""
    match event:
        case RankJoined():
            return _join(state, event)
        case RowsArrived():
            return _receive(state, event)
        case PartClosed():
            return _close(state, event)
        case RankLeft():
            return _at_rest(Transition(replace(state, connected=state.connected - {event.stream})))
        case CutAbandoned():
            return _at_rest(_abandon(state, event.reason))
        case LogFull():
            return _check_room(state, event)
        case RoomMade():
            return Transition(replace(state, full=replace(state.full, room_made=True)))
        case RunFailed():
            return _give_back(state, event)
        case SealFailed() | CutDurable() | CutApplied():
            return _follow_seal(state, event)


def _refused(state: State, error: DeltasyncError) -> Transition:
    return Transition(state, reason=str(error), error=error)


def _at_rest(transition: Transition) -> Transition:
    """Forget the announced tables once neither a rank nor a cut is left."""
    state = transition.state
    if state.cut is None and not state.connected:
        return replace(transition, state=replace(state, tables={}))
    return transition


def _join(state: State, event: RankJoined) -> Transition:
    run, current = event.run, state.run
    decision = may_publish(
        run,
        current,
        event.now_unix_ns,
        gone_seconds=event.gone_seconds,
        earlier=state.earlier,
        rolling_back=state.rolling_back,
    )
    other = current is not None and run.id != current.id
    if not decision.yes:
        if not other:
            return _refused(state, decision.error(decision.reason))
        return _refused(state, decision.error("another run publishes this model", detail=f": {decision.reason}"))
    actions: tuple[Action, ...] = ()
    if current and other:
        state, actions = _end_run(state, decision.reason)
        earlier = (*state.earlier, current.id)[-EARLIER_RUNS:]
        state, actions = replace(state, earlier=earlier), (*actions, EndStreams(decision.reason))
    streams, before = {**state.streams, event.rank: event.stream}, state.streams.get(event.rank)
    connected, tables = (state.connected - {before}) | {event.stream}, {**state.tables, **event.tables}
    last = current if other else state.before
    state = replace(state, run=run, before=last, streams=streams, connected=connected, tables=tables)
    return Transition(state, actions, decision.reason)


def _end_run(state: State, reason: str) -> tuple[State, tuple[Action, ...]]:
    """End the streams of a run. A cut that is being sealed goes on."""
    abandoned = _abandon(state, reason)
    return replace(abandoned.state, streams={}, connected=frozenset(), tables={}), abandoned.actions


def _give_back(state: State, event: RunFailed) -> Transition:
    cut, before = state.cut, state.before
    sealing = cut is not None and cut.run.id == event.run.id and cut.phase is not Phase.ARRIVING
    if state.run != event.run or sealing or state.newest.run == event.run.id:
        return Transition(state)
    reason = f"run {event.run.id} has failed"
    state, actions = _end_run(state, reason)
    earlier = tuple(each for each in state.earlier if before is None or each != before.id)
    state = replace(state, run=before, before=None, earlier=earlier)
    return _at_rest(Transition(state, (*actions, EndStreams()), reason))


def _receive(state: State, event: RowsArrived) -> Transition:
    rank, step, run, newest, cut = event.rank, event.step, state.run, state.newest, state.cut
    if run is None or state.streams.get(rank) != event.stream:
        text = f"a newer stream of rank {rank}, or a newer run, has taken over"
        return _refused(state, Superseded(text))
    if newest.version and newest.run == run.id and step <= newest.step:
        if step == newest.step:
            return Transition(state, (Skip(),), "this version is sealed, and the answer may have been lost")
        text = f"part of step {step}, but step {newest.step} of this run is already published"
        return _refused(state, Contradiction(text))
    if cut and cut.run.id == run.id and step == cut.step and rank in cut.closed:
        return Transition(state, (Skip(),), "an earlier stream of this rank has sent its part")
    if cut and cut.phase is not Phase.ARRIVING:
        text = f"part of step {step} while the cut of step {cut.step} is being sealed"
        return _refused(state, Superseded(text))
    if cut and step < cut.step:
        text = f"part of step {step} while the cut of step {cut.step} is under way"
        return _refused(state, Contradiction(f"{text}: publish the changes of both steps in the later one"))
    actions: tuple[Action, ...] = ()
    if cut is None or step > cut.step:
        dropped = _abandon(state, f"abandoned for the cut of step {step}")
        state, actions = dropped.state, dropped.actions
        cut = CutState(state.cuts + 1, newest.version + 1, step, run)
        state, actions = replace(state, cuts=cut.number), (*actions, BeginCut(cut))
    if cut.parts.get(rank) != event.stream:  # The part begins, perhaps anew.
        cut = replace(cut, parts={**cut.parts, rank: event.stream})
    return Transition(replace(state, cut=cut), actions)


def _close(state: State, event: PartClosed) -> Transition:
    cut = state.cut
    if cut is None or (cut.step, cut.parts.get(event.rank)) != (event.step, event.stream):
        return _refused(state, Superseded(f"the cut of step {event.step} is no longer under way"))
    cut = replace(cut, closed=cut.closed | {event.rank})
    if len(cut.closed) < cut.run.world_size:
        return Transition(replace(state, cut=cut))
    return Transition(replace(state, cut=replace(cut, phase=Phase.SEALING)), (Seal(),), "all parts are closed")


def _abandon(state: State, reason: str) -> Transition:
    """Drop the cut under way while its parts arrive. Nothing is lost, because no rank's cursor has moved."""
    cut = state.cut
    if cut is None or cut.phase is not Phase.ARRIVING:
        return Transition(state, reason="no parts of a cut arrive")
    error = Superseded(f"cut of step {cut.step}: {reason}")
    return Transition(replace(state, cut=None), (Drop(cut, error),), reason)


def _check_room(state: State, event: LogFull) -> Transition:
    if event.refused:
        state = replace(state, full=state.full.after(event.step, event.log_bytes, event.capacity))
    tries = state.full.tries if event.refused else 0
    fits = cut_fits(event.step, event.log_bytes, event.capacity, event.tables, tries)
    if fits.yes:
        return Transition(state, reason=fits.reason)
    error, cut = Contradiction(fits.reason), state.cut
    # A rank that waited for the log may be late. Of a cut that is being sealed, only its seal decides.
    if cut is None or cut.number != event.cut or cut.phase is not Phase.ARRIVING:
        return _refused(state, error)
    return _at_rest(Transition(replace(state, cut=None), (Drop(cut, error),), fits.reason, error))


def _follow_seal(state: State, event: SealFailed | CutDurable | CutApplied) -> Transition:
    cut = state.cut
    if cut is None or cut.number != event.cut:
        return Transition(state, reason="the cut was dropped")
    if isinstance(event, CutDurable):
        newest = Sealed(cut.version, cut.run.id, cut.step)
        return Transition(replace(state, newest=newest, cut=replace(cut, phase=Phase.APPLYING)))
    if isinstance(event, SealFailed) and cut.phase is not Phase.APPLYING:
        return _at_rest(Transition(replace(state, cut=None), (Drop(cut, event.error),), str(event.error)))
    return _at_rest(Transition(replace(state, cut=None), (Answer(),), "replicas can get it"))


# Whether cuts fit into a log.


def whole_bytes(tables: Sequence[TableSpec]) -> int:
    """Bytes in the log of all rows of some tables: ids, values and digests."""
    return sum(table.rows * (table.row_bytes + DIGEST_TYPE.itemsize) for table in tables)


def first_cut_fits(tables: Sequence[TableSpec], capacity: int) -> Decision:
    """Whether the first cut of a model, with every row of its tables, fits into a log for `capacity` bytes."""
    needed = whole_bytes(tables)
    if needed <= capacity:
        return Decision(True, f"all rows need {needed} bytes of a log that has room for {capacity}")
    return Decision(False, f"all rows of its tables need {needed} bytes in the log, {_room(capacity, needed)}")


def cut_fits(step: int, log_bytes: int, capacity: int, tables: Sequence[TableSpec], tries: int = 0) -> Decision:
    """Whether the cut of a step, of which `log_bytes` bytes have arrived, fits into a log for `capacity` bytes.

    It may contain every row of `tables`. `tries`: see `Refusals`.
    """
    if log_bytes <= capacity and tries < MOST_TRIES:
        return Decision(True, f"{log_bytes} bytes of a log that has room for {capacity}")
    text = f"the cut of step {step} already needs {log_bytes} bytes in the log"
    return Decision(False, f"{text}, {_room(capacity, max(log_bytes, whole_bytes(tables)))}")


def enough(needed: int) -> int:
    """A value of `--log-max-bytes` with room for a cut of `needed` bytes in chunks of normal size."""
    return -(-(needed * 6 // 5 + _MIB) // _MIB) * _MIB


def _room(capacity: int, needed: int) -> str:
    return (
        f"which has room for {capacity}: restart the service with --log-max-bytes {enough(needed)} or more, and "
        "check that its volume has room for that and the tables"
    )
