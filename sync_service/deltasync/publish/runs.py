"""Who may publish, and whether a run continues the published history. Pure decisions, each with its reason."""

from dataclasses import dataclass

from deltasync.core.position import Decision, Position
from deltasync.core.seal import Seal

# How far clocks of different machines may be apart.
MAX_AHEAD_NS = 300 * 10**9


@dataclass(frozen=True)
class Run:
    """One training run: an id, when it began (nanoseconds since 1970) and its number of ranks."""

    id: str
    started_unix_ns: int
    world_size: int


def may_publish(run: Run, current: Run | None, now_unix_ns: int) -> Decision:
    """Whether a rank of `run` may open a stream while `current` is the run that publishes."""
    if current and run.id == current.id:
        if run.world_size != current.world_size:
            return Decision(
                False,
                f"run {run.id} has {current.world_size} ranks, this one says {run.world_size}: "
                "give a run of another size an id of its own",
            )
        return Decision(True, f"run {run.id} is publishing")
    if _ahead(run, now_unix_ns):
        seconds = (run.started_unix_ns - now_unix_ns) // 10**9
        return Decision(
            False, f"run {run.id} began {seconds} s ahead of the service's clock: set the clocks right"
        )
    if current is None:
        return Decision(True, f"run {run.id} is the first to publish")
    if run.started_unix_ns <= current.started_unix_ns and not _ahead(current, now_unix_ns):
        return Decision(False, f"run {run.id} began before run {current.id}, which has taken over: stop it")
    return Decision(True, f"run {run.id} takes over from run {current.id}")


def _ahead(run: Run, now_unix_ns: int) -> bool:
    """Whether a run claims to have begun in the future: no other run could ever take over from it."""
    return run.started_unix_ns - now_unix_ns > MAX_AHEAD_NS


def continues(run: Run, claim: Position, history: str, newest: Seal | None) -> Decision:
    """Whether what `run` holds is known to build on the newest version.

    Args:
        run: the run.
        claim: the position it claims to hold.
        history: the service's history.
        newest: the newest seal.
    """
    if newest is None:
        return Decision(False, "nothing is published yet")
    if claim.history and claim.history != history:
        return Decision(False, f"the run holds history {claim.history}, the service history {history}")
    if claim.number > newest.version:
        return Decision(False, f"the run holds version {claim.number}, the newest one is only {newest.version}")
    if run.id == newest.run:
        return Decision(True, f"run {run.id} published version {newest.version} itself")
    if claim.number == newest.version and claim.history == history:
        return Decision(True, f"the run holds version {newest.version}, the newest one")
    if claim.number:
        return Decision(False, f"the run holds version {claim.number}, the newest one is {newest.version}")
    return Decision(False, f"the run holds no version, the newest one is {newest.version}")
