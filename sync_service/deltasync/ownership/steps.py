"""What a process is to do next about the models: claim, give up, or say again what it owns."""

from dataclasses import dataclass, field

from deltasync.ownership.heirs import heir_of
from deltasync.ownership.view import View


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
