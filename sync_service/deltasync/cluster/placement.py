"""Decides which process owns, serves and inherits a model, and the next steps of a process. Pure functions."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from deltasync.base.errors import NotFound, Owner
from deltasync.cluster.bucket import ClusterState, Member


def ranked(model: str, names: Iterable[str]) -> list[str]:
    """The order of processes for a model, by rendezvous hashing.

    Each model has its own order. The loss of a process gives only its own models another first process.
    """

    def weight(name: str) -> tuple[bytes, str]:
        return blake2b(f"{model}\0{name}".encode(), digest_size=8).digest(), name

    return sorted(names, key=weight, reverse=True)


def heir_of(model: str, members: Collection[Member], preferred: str = "") -> Member | None:
    """The process that should take over a model: the preferred one if it can; None if none can."""
    able = {member.name: member for member in members if not member.draining}
    if preferred in able:
        return able[preferred]
    return able[ranked(model, able)[0]] if able else None


def next_after(model: str, name: str, members: Collection[Member]) -> str:
    """The process that tries next after one that failed to take over a model; empty without another."""
    able = ranked(model, {member.name for member in members if not member.draining} | {name})
    following = able[(able.index(name) + 1) % len(able)]
    return following if following != name else ""


def next_heir(model: str, state: ClusterState, to: str = "") -> str:
    """The other process that should take over a model: `to` if given; empty without another.

    Raises:
        NotFound: no process `to` is alive, or it is draining.
    """
    others = {each.name: each for each in state.members.values() if not each.draining and each.name != state.me}
    if to and to not in others:
        raise NotFound(f"no process {to!r} can take over a model", detail=f"; processes: {sorted(others)}")
    heir = heir_of(model, others.values(), to)
    return heir.name if heir else ""


@dataclass(frozen=True)
class Responsibility:
    """Whether this process serves a model.

    Attributes:
        here: whether it does.
        owner: the process to ask instead; None if there is none yet and the caller should retry here.
        reason: why, in words.
    """

    here: bool
    owner: Owner | None
    reason: str


def responsibility_for(model: str, state: ClusterState) -> Responsibility:
    """Decide which process serves a model."""
    if not state.confirmed:
        return Responsibility(False, None, "brokers have not confirmed the lease of this process in time")
    if model in state.own:
        if model in state.open:
            return Responsibility(True, None, "this process owns it")
        return Responsibility(False, None, "this process is taking it over, or giving it up")
    if owner := state.owner_of(model):
        return Responsibility(False, owner, f"{owner.process} owns it")
    return _unowned(model, state)


def _unowned(model: str, state: ClusterState) -> Responsibility:
    claim = state.claims.get(model)
    preferred = claim.process or claim.heir if claim else ""
    heir = heir_of(model, state.members.values(), preferred)
    if heir is None:
        return Responsibility(False, None, "no process owns it, and all live ones are draining")
    if heir.name != state.me:
        return Responsibility(False, heir.owner(), f"no process owns it, and {heir.name} should take it over")
    if claim or model in state.with_log or model in state.waiting:
        return Responsibility(False, None, "no process owns it, and this one is about to take it over")
    return Responsibility(True, None, "it is a new model, which this process would own")


@dataclass(frozen=True)
class Steps:
    """The next steps of a process: models, each with the reason in words.

    Attributes:
        claim: models to claim.
        give_up: models to give up.
        write_again: models whose claims are missing in the bucket; write them again.
        let_go: models whose claims name this process, which will not take them over; release the claims.
    """

    claim: dict[str, str] = field(default_factory=dict)
    give_up: dict[str, str] = field(default_factory=dict)
    write_again: dict[str, str] = field(default_factory=dict)
    let_go: dict[str, str] = field(default_factory=dict)


def next_steps(state: ClusterState) -> Steps:
    """Decide the next steps of a process."""
    if not state.confirmed:
        reason = "brokers have not confirmed the lease of this process in time: another one may own the model"
        return Steps(give_up=dict.fromkeys(sorted(state.own), reason))
    steps, me = Steps(), state.members.get(state.me)
    for model in sorted({*state.claims, *state.own, *state.with_log}):
        claim = state.claims.get(model)
        if model in state.own:
            _keep(state, model, steps)
        elif reason := claim_reason(state, model):
            steps.claim[model] = reason
        elif claim and claim.process == state.me and me and me.draining:  # Others wait for this process.
            steps.let_go[model] = "this process is draining"
        elif claim and claim.counts_before(state.stored.get(model)):  # Its restarted owner may not know it.
            steps.write_again[model] = "its claim is missing in the bucket"
    return steps


def claim_reason(state: ClusterState, model: str) -> str:
    """Why this process should claim a model that it does not own; empty if it should not."""
    if state.owner_of(model) or model in state.waiting:
        return ""
    claim = state.claims.get(model)
    # A process that owned the model before takes precedence over the heir.
    preferred = (state.me if claim.process == state.me else claim.heir) if claim else ""
    heir = heir_of(model, state.members.values(), preferred)
    if heir is None or heir.name != state.me:
        return ""
    if claim is None:
        return "no process owns it"
    if claim.process == state.me:
        return "this process owned it before"
    if claim.owner:
        return f"{claim.process} owned it, and its lease has expired"
    return "it was given up" + (" for this process" if claim.heir == state.me else "")


def _keep(state: ClusterState, model: str, steps: Steps) -> None:
    own, latest, stored = state.own[model], state.claims.get(model), state.stored.get(model)
    if latest is not None and latest != own and latest.counts_before(own):
        by = f"{latest.process} has claimed it since" if latest.process else "its claim was released"
        steps.give_up[model] = by
    elif stored is None or own.counts_before(stored):
        steps.write_again[model] = "the bucket was lost, or restored from an older copy"
