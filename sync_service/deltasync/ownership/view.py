"""What decisions on ownership are made of."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from deltasync.core.owner import Owner
from deltasync.ownership.claim import Claim
from deltasync.ownership.member import Member


@dataclass(frozen=True)
class View:
    """What a process knows at a moment.

    Attributes:
        me: its name.
        confirmed: whether the others have heard of it within the lease.
        members: the processes that are alive, by name.
        claims: the latest claim known of each model.
        stored: those of them that the bucket has.
        held: with which claim it holds each of its models, or is about to.
        known: models that have a log, whether or not anybody ever claimed them.
        waiting: models that it could not take lately, and does not try again yet.
    """

    me: str
    confirmed: bool
    members: Mapping[str, Member]
    claims: Mapping[str, Claim]
    stored: Mapping[str, Claim] = field(default_factory=dict)
    held: Mapping[str, Claim] = field(default_factory=dict)
    known: Collection[str] = ()
    waiting: Collection[str] = ()

    def owner_of(self, model: str) -> Owner | None:
        """The owner of a model, if it is alive; of this process, only what it holds."""
        claim = self.claims.get(model)
        if claim is None or claim.owner is None:
            return None
        if claim.process == self.me:
            return claim.owner if model in self.held else None
        member = self.members.get(claim.process)
        return replace(claim.owner, grpc=member.grpc, http=member.http) if member else None
