"""What a process does next about the models, who answers for one, and who comes next. Pure decisions."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from deltasync.base.errors import Owner
from deltasync.cluster.member import Member
from deltasync.cluster.table import View


def ranked(model: str, names: Iterable[str]) -> list[str]:
    """Processes in the order in which they are to have a model (rendezvous hashing): each model has its own order,
    and where a process goes, only its models get another first one.
    """
    return sorted(names, key=lambda name: (_weight(model, name), name), reverse=True)


def heir_of(model: str, members: Collection[Member], wanted: str = "") -> Member | None:
    """The process that is to have a model: the one that is wanted, if it can; None where nobody can."""
    able = {member.name: member for member in members if not member.draining}
    if wanted in able:
        return able[wanted]
    return able[ranked(model, able)[0]] if able else None


def next_after(model: str, name: str, members: Collection[Member]) -> str:
    """Who is to try after a process that cannot have a model; empty where there is no other."""
    able = ranked(model, {member.name for member in members if not member.draining} | {name})
    following = able[(able.index(name) + 1) % len(able)]
    return following if following != name else ""


def _weight(model: str, name: str) -> bytes:
    return blake2b(f"{model}\0{name}".encode(), digest_size=8).digest()


@dataclass(frozen=True)
class Answer:
    """Whether this process answers for a model.

    Attributes:
        here: it does.
        owner: where to ask otherwise; None: nowhere yet, come back here.
        reason: why, in words.
    """

    here: bool
    owner: Owner | None
    reason: str


def answer_for(model: str, view: View, *, taken: bool) -> Answer:
    """Who answers for a model.

    Args:
        model: its name.
        view: what this process knows.
        taken: whether what it holds of the model is open, not only claimed.
    """
    if not view.confirmed:
        return Answer(False, None, "brokers have not confirmed within the lease that this process is alive")
    if model in view.held:
        return Answer(
            taken, None, "this process owns it" if taken else "this process is about to have it, or to give it up"
        )
    if owner := view.owner_of(model):
        return Answer(False, owner, f"{owner.process} owns it")
    return _unowned(model, view)


def _unowned(model: str, view: View) -> Answer:
    claim = view.claims.get(model)
    wanted = claim.process or claim.heir if claim else ""
    heir = heir_of(model, list(view.members.values()), wanted)
    if heir is None:
        return Answer(False, None, "no process owns it, and none that is not draining is there to")
    if heir.name != view.me:
        return Answer(False, heir.owner(), f"no process owns it, and {heir.name} is to")
    if claim or model in view.known or model in view.waiting:
        return Answer(False, None, "no process owns it, and this one is about to")
    return Answer(True, None, "no process has heard of it, and this one would own it")


@dataclass(frozen=True)
class Steps:
    """Models, each with the reason in words.

    Attributes:
        claim: to be claimed.
        give_up: held ones, not to be held any more.
        say_again: those whose claim the bucket does not know any more.
        let_go: those said to be this process's, which it neither holds nor takes any more.
    """

    claim: dict[str, str] = field(default_factory=dict)
    give_up: dict[str, str] = field(default_factory=dict)
    say_again: dict[str, str] = field(default_factory=dict)
    let_go: dict[str, str] = field(default_factory=dict)


def next_steps(view: View) -> Steps:
    """What a process is to do, given what it knows."""
    if not view.confirmed:
        reason = (
            "brokers have not confirmed within the lease that this process is alive: another one may own it by now"
        )
        return Steps(give_up=dict.fromkeys(sorted(view.held), reason))
    steps = Steps()
    for model in sorted({*view.claims, *view.held, *view.known}):
        if model in view.held:
            _keep(view, model, steps)
        elif reason := claim_reason(view, model):
            steps.claim[model] = reason
        elif _is_left_over(view, model):
            steps.let_go[model] = "this process is draining"
        elif _is_forgotten(view, model):
            steps.say_again[model] = "the bucket does not know what this process knows"
    return steps


def claim_reason(view: View, model: str) -> str:
    """Why a process is to claim a model that it does not hold; empty if it is not to."""
    if view.owner_of(model) or model in view.waiting:
        return ""
    claim, heir = view.claims.get(model), heir_of(model, list(view.members.values()), _wanted(view, model))
    if heir is None or heir.name != view.me:
        return ""
    if claim is None:
        return "no process has it"
    if claim.process == view.me:
        return "this process had it before"
    if claim.owner:
        return f"{claim.process} had it, and was not heard of within the lease"
    return "it was given up" + (" for this process" if claim.heir == view.me else "")


def _wanted(view: View, model: str) -> str:
    """Who is to have a model whatever its order: who had it before, or for whom it was given up."""
    claim = view.claims.get(model)
    if claim is None:
        return ""
    return view.me if claim.process == view.me else claim.heir


def _keep(view: View, model: str, steps: Steps) -> None:
    held, latest, stored = view.held[model], view.claims.get(model), view.stored.get(model)
    if latest is not None and latest != held and latest.counts_before(held):
        steps.give_up[model] = _lost_reason(latest.process)
    elif stored is None or held.counts_before(stored):
        steps.say_again[model] = "the bucket was lost, or is of before it was claimed"


def _is_left_over(view: View, model: str) -> bool:
    """Whether others wait for this process to have a model which it is not going to take."""
    claim, me = view.claims.get(model), view.members.get(view.me)
    return claim is not None and claim.process == view.me and me is not None and me.draining


def _is_forgotten(view: View, model: str) -> bool:
    """Whether the bucket has forgotten a claim: its owner, started anew, may not know that it is one."""
    claim = view.claims.get(model)
    return claim is not None and claim.counts_before(view.stored.get(model))


def _lost_reason(process: str) -> str:
    return f"{process} has claimed it since" if process else "it was given up in its name"
