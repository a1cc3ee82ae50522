"""Who answers for a model: this process, another one, or nobody yet."""

from dataclasses import dataclass

from deltasync.core.owner import Owner
from deltasync.ownership.heirs import heir_of
from deltasync.ownership.view import View


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
