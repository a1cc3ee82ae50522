"""What a process does next about the models, who answers for one, and who comes next. Pure decisions."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from deltasync.base.errors import Owner
from deltasync.cluster.bucket_copy import ClusterState
from deltasync.cluster.member import Member


def ranked(model: str, names: Iterable[str]) -> list[str]:
    """Processes in the order in which they are to have a model (rendezvous hashing): each model has its own order,
    and where a process goes, only its models get another first one.
    """
    return sorted(names, key=lambda name: (_weight(model, name), name), reverse=True)


def heir_of(model: str, members: Collection[Member], preferred: str = "") -> Member | None:
    """The process that is to have a model: the preferred one, if it can; None where nobody can."""
    able = {member.name: member for member in members if not member.draining}
    if preferred in able:
        return able[preferred]
    return able[ranked(model, able)[0]] if able else None


def next_after(model: str, name: str, members: Collection[Member]) -> str:
    """Who is to try after a process that cannot have a model; empty where there is no other."""
    able = ranked(model, {member.name for member in members if not member.draining} | {name})
    following = able[(able.index(name) + 1) % len(able)]
    return following if following != name else ""


def _weight(model: str, name: str) -> bytes:
    return blake2b(f"{model}\0{name}".encode(), digest_size=8).digest()


@dataclass(frozen=True)
class Responsibility:
    """Whether this process answers for a model.

    Attributes:
        here: it does.
        owner: where to ask otherwise; None: nowhere yet, come back here.
        reason: why, in words.
    """

    here: bool
    owner: Owner | None
    reason: str


def responsibility_for(model: str, state: ClusterState, *, is_open: bool) -> Responsibility:
    """Who answers for a model.

    Args:
        model: its name.
        state: what this process knows.
        is_open: whether it has opened the model, and not only claimed it.
    """
    if not state.confirmed:
        return Responsibility(
            False, None, "brokers have not confirmed within the lease that this process is alive"
        )
    if model in state.own:
        return Responsibility(
            is_open,
            None,
            "this process owns it" if is_open else "this process is about to have it, or to give it up",
        )
    if owner := state.owner_of(model):
        return Responsibility(False, owner, f"{owner.process} owns it")
    return _unowned(model, state)


def _unowned(model: str, state: ClusterState) -> Responsibility:
    claim = state.claims.get(model)
    preferred = claim.process or claim.heir if claim else ""
    heir = heir_of(model, list(state.members.values()), preferred)
    if heir is None:
        return Responsibility(False, None, "no process owns it, and none that is not draining is there to")
    if heir.name != state.me:
        return Responsibility(False, heir.owner(), f"no process owns it, and {heir.name} is to")
    if claim or model in state.with_log or model in state.waiting:
        return Responsibility(False, None, "no process owns it, and this one is about to")
    return Responsibility(True, None, "no process has heard of it, and this one would own it")


@dataclass(frozen=True)
class Steps:
    """Models, each with the reason in words.

    Attributes:
        claim: to be claimed.
        give_up: to be given up by this process.
        say_again: to be written into the bucket again, which has lost their claims.
        let_go: claimed by this process, which neither has nor takes them any more.
    """

    claim: dict[str, str] = field(default_factory=dict)
    give_up: dict[str, str] = field(default_factory=dict)
    say_again: dict[str, str] = field(default_factory=dict)
    let_go: dict[str, str] = field(default_factory=dict)


def next_steps(state: ClusterState) -> Steps:
    """What a process is to do, given what it knows."""
    if not state.confirmed:
        reason = (
            "brokers have not confirmed within the lease that this process is alive: another one may own it by now"
        )
        return Steps(give_up=dict.fromkeys(sorted(state.own), reason))
    steps = Steps()
    for model in sorted({*state.claims, *state.own, *state.with_log}):
        if model in state.own:
            _keep(state, model, steps)
        elif reason := claim_reason(state, model):
            steps.claim[model] = reason
        elif _is_left_over(state, model):
            steps.let_go[model] = "this process is draining"
        elif _is_forgotten(state, model):
            steps.say_again[model] = "the bucket does not know what this process knows"
    return steps


def claim_reason(state: ClusterState, model: str) -> str:
    """Why a process is to claim a model that it does not have; empty if it is not to."""
    if state.owner_of(model) or model in state.waiting:
        return ""
    claim, heir = state.claims.get(model), heir_of(model, list(state.members.values()), _preferred(state, model))
    if heir is None or heir.name != state.me:
        return ""
    if claim is None:
        return "no process has it"
    if claim.process == state.me:
        return "this process had it before"
    if claim.owner:
        return f"{claim.process} had it, and was not heard of within the lease"
    return "it was given up" + (" for this process" if claim.heir == state.me else "")


def _preferred(state: ClusterState, model: str) -> str:
    """Who is to have a model whatever its order: who had it before, or for whom it was given up."""
    claim = state.claims.get(model)
    if claim is None:
        return ""
    return state.me if claim.process == state.me else claim.heir


def _keep(state: ClusterState, model: str, steps: Steps) -> None:
    own, latest, stored = state.own[model], state.claims.get(model), state.stored.get(model)
    if latest is not None and latest != own and latest.counts_before(own):
        by = f"{latest.process} has claimed it since" if latest.process else "it was given up in its name"
        steps.give_up[model] = by
    elif stored is None or own.counts_before(stored):
        steps.say_again[model] = "the bucket was lost, or is of before it was claimed"


def _is_left_over(state: ClusterState, model: str) -> bool:
    """Whether others wait for this process to have a model which it is not going to take."""
    claim, me = state.claims.get(model), state.members.get(state.me)
    return claim is not None and claim.process == state.me and me is not None and me.draining


def _is_forgotten(state: ClusterState, model: str) -> bool:
    """Whether the bucket has forgotten a claim: its owner, started anew, may not know that it is one."""
    claim = state.claims.get(model)
    return claim is not None and claim.counts_before(state.stored.get(model))
