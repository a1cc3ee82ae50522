"""What a process knows of the others: a copy of their bucket, and the state that follows from it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from deltasync.base.errors import Owner
from deltasync.cluster.bucket import CONSUMER, MODEL, PROCESS, Entry, name_of, to_claim, to_consumer, to_member
from deltasync.cluster.member import Claim, Member


@dataclass(frozen=True)
class ClusterState:
    """What a process knows at a moment.

    Attributes:
        me: its name.
        confirmed: whether the others have heard of it within the lease.
        members: the processes that are alive, by name.
        claims: the latest claim known of each model.
        stored: those of them that the bucket has.
        own: the claims of the models that this process owns, takes or gives up.
        with_log: models that have a log, whether or not anybody ever claimed them.
        waiting: models that it could not take lately, and does not try again yet.
    """

    me: str
    confirmed: bool
    members: Mapping[str, Member]
    claims: Mapping[str, Claim]
    stored: Mapping[str, Claim] = field(default_factory=dict)
    own: Mapping[str, Claim] = field(default_factory=dict)
    with_log: Collection[str] = ()
    waiting: Collection[str] = ()

    def owner_of(self, model: str) -> Owner | None:
        """The owner of a model, if it is alive; this process only where it has the model."""
        claim = self.claims.get(model)
        if claim is None or claim.owner is None:
            return None
        if claim.process == self.me:
            return claim.owner if model in self.own else None
        member = self.members.get(claim.process)
        return replace(claim.owner, grpc=member.grpc, http=member.http) if member else None


@dataclass(frozen=True)
class _LastWord:
    """The last that was heard of a process, and when, nanoseconds by the clock of this one."""

    member: Member
    revision: int
    at_ns: int


class BucketCopy:
    """A copy of the bucket, and what it once has said: what is known stays known where the bucket is lost, or put
    back to an earlier copy. In the event loop.
    """

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._revisions = dict[str, int]()
        self._last_words = dict[str, _LastWord]()
        self.claims = dict[str, Claim]()  # The latest known of each model.
        self.stored = dict[str, Claim]()  # Those that the bucket has.
        self.consumers = dict[str, str]()  # The model of each.
        self.stored_consumers = dict[str, str]()
        self.deletions = 0  # How often a model was seen to be deleted.
        self._followed = dict[str, int]()  # At which revision following has told of a key last.
        self._epoch = 0

    @property
    def next_epoch(self) -> int:
        """Later than any that was ever heard of."""
        return self._epoch + 1

    def revision(self, key: str) -> int:
        """At which revision the bucket has a key; 0 if it has not."""
        return self._revisions.get(key, 0)

    def restart(self) -> None:
        """The bucket is read anew."""
        self._followed.clear()
        self._revisions.clear()
        self.stored.clear()
        self.stored_consumers.clear()

    def follow(self, entry: Entry) -> None:
        """Following has told of an entry."""
        self._followed[entry.key] = entry.revision

    def followed(self, key: str) -> int:
        """At which revision following has told of a key last; 0 if it has not."""
        return self._followed.get(key, 0)

    def see(self, entry: Entry, now_ns: int) -> None:
        """Take over what an entry says.

        Raises:
            InvalidInput: it says nothing that this version knows; only its revision was taken over.
        """
        if entry.revision <= self.revision(entry.key):
            return
        self._revisions[entry.key] = entry.revision
        kind, name = name_of(entry.key)
        if kind == PROCESS:
            self._see_process(name, entry, now_ns)
        elif kind == MODEL:
            self._see_model(name, entry.value)
        elif kind == CONSUMER:
            self._see_consumer(name, entry.value)

    def living(self, now_ns: int) -> dict[str, Member]:
        """The processes that have been heard of within the lease, by name."""
        return {name: last.member for name, last in sorted(self._last_words.items()) if self._lives(last, now_ns)}

    def silent(self, now_ns: int) -> list[Member]:
        """The processes that have not been heard of within the lease, and have not said goodbye, by name."""
        return [last.member for _, last in sorted(self._last_words.items()) if not self._lives(last, now_ns)]

    def silent_seconds(self, process: str, now_ns: int) -> float | None:
        """For how long nothing was heard of a process; None if nothing ever was."""
        last = self._last_words.get(process)
        return None if last is None else (now_ns - last.at_ns) / 1e9

    def member(self, process: str) -> Member | None:
        """What was last heard of a process, alive or not."""
        last = self._last_words.get(process)
        return None if last is None else last.member

    def _lives(self, last: _LastWord, now_ns: int) -> bool:
        return now_ns - last.at_ns < self._lease_ns

    def _see_process(self, name: str, entry: Entry, now_ns: int) -> None:
        if not entry.value:
            self._last_words.pop(name, None)
            return
        # The bucket says the same again where it is followed anew: nothing was heard of the process.
        last = self._last_words.get(name)
        if last is None or last.revision != entry.revision:
            self._last_words[name] = _LastWord(to_member(entry.value), entry.revision, now_ns)

    def _see_model(self, name: str, value: bytes) -> None:
        self.stored.pop(name, None)
        if not value:
            self.claims.pop(name, None)
            self.deletions += 1
            return
        claim = self.stored[name] = to_claim(value)
        self._epoch = max(self._epoch, claim.epoch)
        if claim.counts_before(self.claims.get(name)):
            self.claims[name] = claim

    def _see_consumer(self, name: str, value: bytes) -> None:
        self.stored_consumers.pop(name, None)
        self.consumers.pop(name, None)
        if value:
            self.stored_consumers[name] = self.consumers[name] = to_consumer(value)
