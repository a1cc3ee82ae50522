"""Decides whether a run may publish and whether it continues the published history. Pure functions."""

from collections.abc import Collection
from dataclasses import dataclass, field

from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, DeltasyncError, NotPermitted, RunRefused, ServiceUnavailable
from deltasync.base.words import counted, utc
from deltasync.core.position import NOWHERE, Position, first_run_id
from deltasync.core.seal import Seal, SealHistory
from deltasync.core.tables import Shard, TableSpec

# Maximum accepted difference between the clocks of two machines.
MAX_AHEAD_NS = 300 * 10**9
# A run that is older by the machines' clocks may follow once all ranks of the current run are gone for this long.
# Live ranks reconnect sooner.
GONE_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """A training run: its id, its start in nanoseconds since 1970, its number of ranks, and the process of the
    rank that reports it, if known. `by` is the identity that publishes it; None if it published before the service
    started. For `rollback_of` and `accepts_any` see `Seal`.
    """

    id: str
    started_unix_ns: int
    world_size: int
    process: str = field(default="", compare=False)
    by: str | None = field(default=None, compare=False)
    rollback_of: int | None = None
    accepts_any: bool = False

    def __str__(self) -> str:
        return f"run {self.id}: {self.process or 'unknown process'}, begun {utc(self.started_unix_ns)}"


@dataclass(frozen=True)
class Opening:
    """How a rank opens its stream.

    Attributes:
        shards: the rows and columns of them that the rank holds.
        claim: the position whose rows it has.
        start_over: see `may_go_on`.
        takes_deletes: whether it deletes rows on request.
        takes_changes: whether it can receive the ids of rows that it must publish again.
    """

    model: str
    run: Run
    rank: int
    tables: list[TableSpec]
    shards: list[Shard]
    claim: Position = NOWHERE
    start_over: bool = False
    takes_deletes: bool = False
    takes_changes: bool = False


@dataclass(frozen=True)
class Continuation(Decision):
    """Whether a run continues the published history, and why.

    `since` is the version that it continues if it must also publish rows that the service names: those of later
    versions, and those that damage has cost. Otherwise None.
    """

    since: int | None = None


@dataclass(frozen=True)
class Admission(Decision):
    """Whether a run is admitted, and why.

    `error` is the error that a refused run gets: `RunRefused` ends it, the others may pass.
    """

    error: type[DeltasyncError] = RunRefused


def may_go_on(
    run: Run, claim: Position, history: str, seals: SealHistory, *, start_over: bool = False
) -> Admission:
    """Whether a run may go on from the position that it claims: not from one that was rolled back since.

    While a rollback is the newest version, its rows may be undone only on purpose. A run must then claim a version
    on which the rollback builds, or a person must vouch for the run's rows: its own options (`start_over`) or the
    operator who rolled back.

    Args:
        run: the run that asks.
        claim: the position whose rows it has.
        history: the service's history.
        seals: the seals of the model.
        start_over: whether the run says that its rows are good although it claims no version.
    """
    claims = _is_in(history, claim, seals)
    discarded_by = seals.rolled_back_by(claim.number) if claims else None
    if discarded_by and (version := discarded_by.rollback_of) is not None:
        text = f"run {run.id} goes on from version {claim.number}, but {_rolled_back(version)}"
        return Admission(False, f"{text}: {_restart_from(run.id, version)}")
    if claims or start_over or seals.newest is None or seals.newest.accepts_any:
        return Admission(True, "no rollback discarded this version")
    if (version := seals.newest.rollback_of) is None:
        return Admission(True, "no rollback is the newest version")
    has = (
        f"version {claim.number} of another history"
        if claim.number
        else "no version, as without a DeltaSync state"
    )
    return Admission(
        False,
        f"run {run.id} goes on from {has}, but {_rolled_back(version)}: {_restart_from(run.id, version)} with its "
        "DeltaSync state. If its rows are good, set SyncOptions(start_over=True), or roll back again with "
        f"deltasync models rollback NAME --version {version} --accept-any",
    )


def _is_in(history: str, claim: Position, seals: SealHistory) -> bool:
    """Whether a claim is a version of this history, as far as its seal or else the history's name proves it."""
    seal = seals.checksum_of(claim.number)
    same = claim.seal == seal if claim.seal and seal else claim.history == history
    return same and 0 < claim.number <= seals.newest_version


def _rolled_back(version: int) -> str:
    return f"the model was rolled back to version {version}"


def _restart_from(run: str, version: int) -> str:
    return (
        f"restart the trainer of run {run} from version {version} (deltasync export, load_export), or from a "
        "checkpoint of that version or an earlier one"
    )


def may_publish(
    run: Run,
    current: Run | None,
    now_unix_ns: int,
    *,
    gone_seconds: float | None = None,
    earlier: Collection[str] = (),
    rolling_back: bool = False,
) -> Admission:
    """Whether a rank of `run` may open a stream while `current` is the run that publishes.

    The later run publishes. Because the clocks of machines may differ, a run that seems older may follow one that
    is gone, unless its trainer published before that one.

    Args:
        run: the run that asks.
        current: the run that publishes, if there is one.
        now_unix_ns: the service's clock, nanoseconds since 1970.
        gone_seconds: seconds since the last rank of `current` left; None while one is connected.
        earlier: ids of the runs that published before `current`.
        rolling_back: whether a rollback has not ended yet; if it fails, the run before it publishes again.
    """
    if current and run.id == current.id:
        if None not in (run.by, current.by) and run.by != current.by:
            text = "belongs to another identity: its ranks must share a token, or a certificate name"
            return Admission(False, f"run {run.id} {text}", NotPermitted)
        if run.world_size != current.world_size:
            return Admission(
                False,
                f"run {run.id} has {counted(current.world_size, 'rank')}, this rank reports {run.world_size}: "
                "use another id for a run of another size",
            )
        if run.started_unix_ns != current.started_unix_ns:
            text = f"run {run.id} began at {current.started_unix_ns}, this rank reports {run.started_unix_ns}"
            return Admission(False, f"{text}: report the start of the run's first rank, or use a new run id")
        return Admission(True, f"run {run.id} is publishing")
    if _ahead(run, now_unix_ns):
        seconds = (run.started_unix_ns - now_unix_ns) // 10**9
        text = f"run {run.id} began {seconds} s ahead of the service's clock: synchronise the clocks"
        return Admission(False, f"{text} ({run}; the service's time is {utc(now_unix_ns)})", Contradiction)
    if current is None:
        return Admission(True, f"run {run.id} is the first to publish")
    both, later = f"({run}; {current})", run.started_unix_ns > current.started_unix_ns
    if _was_there(run, current, earlier) and (version := current.rollback_of) is not None:
        if rolling_back:
            text = f"the model is being rolled back to version {version}; run {run.id} goes on only if that fails"
            return Admission(False, text, ServiceUnavailable)
        return Admission(False, f"{_rolled_back(version)}: {_restart_from(run.id, version)}")
    if _was_there(run, current, earlier):
        was = "published" if later else "began"  # By the clocks of their machines.
        return Admission(
            False, f"run {run.id} {was} before run {current.id}, which has taken over: stop run {run.id} {both}"
        )
    if later or _ahead(current, now_unix_ns):
        return Admission(True, f"run {run.id} takes over from run {current.id} {both}")
    return _follow_gone(run, current, gone_seconds, both)


def _was_there(run: Run, current: Run, earlier: Collection[str]) -> bool:
    """Whether a run's trainer published before the current one; for one trainer, whether the run did."""
    trainer = first_run_id(run.id)
    if trainer == first_run_id(current.id):
        return run.id in earlier
    return trainer in map(first_run_id, earlier)


def _follow_gone(run: Run, current: Run, gone_seconds: float | None, both: str) -> Admission:
    """Whether a run may follow one that began later by the clocks of their machines."""
    if gone_seconds is None:
        text = f"run {run.id} began before run {current.id}, which has taken over: stop run {run.id}"
        text = f"{text}; if it began later, synchronise the clocks of their machines {both}"
        return Admission(False, text, Contradiction)  # Until the other run ends.
    if gone_seconds < GONE_SECONDS:
        text = f"run {run.id} may follow run {current.id}, which began later by the clocks of their machines, once"
        gone = f"its ranks have been gone for {GONE_SECONDS:.0f} s, so far {gone_seconds:.0f} s"
        return Admission(False, f"{text} {gone} {both}", ServiceUnavailable)
    text = f"run {run.id} follows run {current.id}, whose ranks have been gone for {gone_seconds:.0f} s"
    return Admission(True, f"{text}, although it began earlier by the clocks of their machines {both}")


def _ahead(run: Run, now_unix_ns: int) -> bool:
    """Whether a run claims to have begun in the future, so that no other run could take over from it."""
    return run.started_unix_ns - now_unix_ns > MAX_AHEAD_NS


def continues(
    run: Run,
    claim: Position,
    history: str,
    newest: Seal | None,
    seal: int = 0,
    *,
    takes_changes: bool = False,
    lacks: str = "",
) -> Continuation:
    """Whether the rows of a run are those of a published version, which one, and whether it must publish more.

    `seal` is the checksum of the seal of `claim.number` in this history, or 0; `lacks` are the rows that damage
    has cost the service, in words.
    """
    if newest is None:
        return Continuation(False, "nothing is published yet")
    decision = _continues(run, claim, history, newest, seal, takes_changes=takes_changes)
    if not decision.yes or not lacks:
        return decision
    text = f"damage has cost the service {lacks}"
    if not takes_changes:
        return Continuation(False, text)
    since = newest.version if decision.since is None else decision.since
    return Continuation(True, f"{decision.reason}; {text}", since)


def _continues(
    run: Run, claim: Position, history: str, newest: Seal, seal: int, *, takes_changes: bool
) -> Continuation:
    """`continues` of a service that lacks nothing."""
    comparable = bool(claim.seal and seal)  # Equal seals prove an equal past, even under another name.
    if comparable and claim.seal != seal:
        return Continuation(
            False, f"the run holds version {claim.number}, which differs from that version of this history"
        )
    if claim.history and claim.history != history and not comparable:
        return Continuation(False, f"the run holds history {claim.history}, the service history {history}")
    if claim.number > newest.version:
        text = f"the run holds version {claim.number}, the newest one is only {newest.version}"
        return Continuation(False, text)
    if run.id == newest.run:
        return Continuation(True, f"run {run.id} published version {newest.version} itself")
    if claim.number == newest.version and (comparable or claim.history == history):
        return Continuation(True, f"the run holds version {newest.version}, the newest one")
    text = f"the run holds {f'version {claim.number}' if claim.number else 'no version'}"
    if comparable and takes_changes:
        return Continuation(True, f"{text}, and gets the ids of later rows", claim.number)
    return Continuation(False, f"{text}, the newest one is {newest.version}")
