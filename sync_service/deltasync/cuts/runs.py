"""Who may publish, and whether a run continues the published history. Pure decisions, each with its reason."""

from collections.abc import Collection
from dataclasses import dataclass, field

from deltasync.base.decision import Decision
from deltasync.base.words import counted, utc
from deltasync.core.position import Position, first_run_id
from deltasync.core.seal import Seal

# How far clocks of different machines may be apart.
MAX_AHEAD_NS = 300 * 10**9
# For so long all ranks of a run are to be gone before one may follow that is older by their machines' clocks:
# ranks that are still there come back sooner.
GONE_SECONDS = 60.0


@dataclass(frozen=True)
class Run:
    """One training run: an id, when it began (nanoseconds since 1970), its number of ranks, and the process of the
    rank that says so, in words; empty where that is not known. `by` is the name of the identity that publishes it;
    None where that is not known, as of a run of before the service started.
    """

    id: str
    started_unix_ns: int
    world_size: int
    process: str = field(default="", compare=False)
    by: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"run {self.id}: {self.process or 'a process not known'}, begun {utc(self.started_unix_ns)}"


@dataclass(frozen=True)
class Continuation(Decision):
    """Whether a run goes on from the published history, and why.

    `since` is the version it goes on from where that is not the newest: it is to publish again what was published
    after that; None if there is nothing of that kind.
    """

    since: int | None = None


@dataclass(frozen=True)
class Admission(Decision):
    """Whether a run is let in, and why; `later`: it is not yet, but may be if it asks again."""

    later: bool = False


def may_join(run: Run, current: Run | None) -> Decision:
    """Whether an identity may be a rank of a run: only that which has opened it. Whoever else may publish the
    model, and has got hold of the run's id, is still none of its ranks.
    """
    if current is None or run.id != current.id or None in (run.by, current.by) or run.by == current.by:
        return Decision(True, f"run {run.id} is its own")
    text = f"run {run.id} is another identity's: all of its ranks need one token, or certificates with one name"
    return Decision(False, text)


def may_publish(
    run: Run,
    current: Run | None,
    now_unix_ns: int,
    *,
    gone_seconds: float | None = None,
    earlier: Collection[str] = (),
) -> Admission:
    """Whether a rank of `run` may open a stream while `current` is the run that publishes.

    The run that began later is the one to publish. When they began, their machines say, whose clocks may differ:
    one that seems to be older may follow a run that is gone, unless its trainer is known to have been there before
    that.

    Args:
        run: the run that asks.
        current: the run that publishes, if there is one.
        now_unix_ns: the service's clock, nanoseconds since 1970.
        gone_seconds: for how long no rank of `current` has been there; None while one is.
        earlier: ids of the runs known to have published before `current`.
    """
    if current and run.id == current.id:
        if run.world_size != current.world_size:
            return Admission(
                False,
                f"run {run.id} has {counted(current.world_size, 'rank')}, this one says {run.world_size}: "
                "give a run of another size an id of its own",
            )
        return Admission(True, f"run {run.id} is publishing")
    if _ahead(run, now_unix_ns):
        seconds = (run.started_unix_ns - now_unix_ns) // 10**9
        text = f"run {run.id} began {seconds} s ahead of the service's clock: set the clocks right"
        return Admission(False, f"{text} ({run}; here it is {utc(now_unix_ns)})")
    if current is None:
        return Admission(True, f"run {run.id} is the first to publish")
    both, later = f"({run}; {current})", run.started_unix_ns > current.started_unix_ns
    if _was_there(run, current, earlier):
        was = "was there" if later else "began"  # By the clocks of their machines.
        return Admission(
            False, f"run {run.id} {was} before run {current.id}, which has taken over: stop it {both}"
        )
    if later or _ahead(current, now_unix_ns):
        return Admission(True, f"run {run.id} takes over from run {current.id} {both}")
    return _follow_gone(run, current, gone_seconds, both)


def _was_there(run: Run, current: Run, earlier: Collection[str]) -> bool:
    """Whether the trainer of a run was there before that of the current one; of one trainer's runs, the run."""
    trainer = first_run_id(run.id)
    if trainer == first_run_id(current.id):
        return run.id in earlier
    return trainer in map(first_run_id, earlier)


def _follow_gone(run: Run, current: Run, gone_seconds: float | None, both: str) -> Admission:
    """Whether a run may follow one that began later, by the clocks of their machines."""
    if gone_seconds is None:
        text = f"run {run.id} began before run {current.id}, which has taken over: stop it"
        return Admission(False, f"{text}; or set the clocks of their machines right, if it was not before {both}")
    if gone_seconds < GONE_SECONDS:
        text = f"run {run.id} may follow run {current.id}, which began later by the clocks of their machines, once"
        gone = f"all ranks of that have been gone for {GONE_SECONDS:.0f} s, by now {gone_seconds:.0f}"
        return Admission(False, f"{text} {gone} {both}", later=True)
    text = f"run {run.id} follows run {current.id}, whose ranks have been gone for {gone_seconds:.0f} s"
    return Admission(True, f"{text}, though that began later by the clocks of their machines {both}")


def _ahead(run: Run, now_unix_ns: int) -> bool:
    """Whether a run claims to have begun in the future: no other run could ever take over from it."""
    return run.started_unix_ns - now_unix_ns > MAX_AHEAD_NS


def continues(
    run: Run, claim: Position, history: str, newest: Seal | None, seal: int = 0, *, takes_changes: bool = False
) -> Continuation:
    """Whether what `run` holds is known to be what was published at a version, and which.

    Args:
        run: the run.
        claim: the position it claims to hold.
        history: the service's history.
        newest: the newest seal.
        seal: the checksum of the seal that `claim.number` has in that history; 0 where it is not known.
        takes_changes: whether the run can be told which rows were published after its version.
    """
    if newest is None:
        return Continuation(False, "nothing is published yet")
    known = bool(claim.seal and seal)  # The same past, whatever the history is called; or not.
    if known and claim.seal != seal:
        return Continuation(
            False, f"the run holds version {claim.number} of a past that this history does not have"
        )
    if claim.history and claim.history != history and not known:
        return Continuation(False, f"the run holds history {claim.history}, the service history {history}")
    if claim.number > newest.version:
        text = f"the run holds version {claim.number}, the newest one is only {newest.version}"
        return Continuation(False, text)
    if run.id == newest.run:
        return Continuation(True, f"run {run.id} published version {newest.version} itself")
    if claim.number == newest.version and (known or claim.history == history):
        return Continuation(True, f"the run holds version {newest.version}, the newest one")
    text = f"the run holds {f'version {claim.number}' if claim.number else 'no version'}"
    if known and takes_changes:
        return Continuation(True, f"{text}, and learns what came after", claim.number)
    return Continuation(False, f"{text}, the newest one is {newest.version}")
