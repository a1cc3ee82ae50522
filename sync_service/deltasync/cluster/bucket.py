"""What the processes of a cluster record about themselves and their models, in a bucket and in a copy of it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from deltasync.base.arguments import check_name
from deltasync.base.errors import DeltasyncError, InvalidInput, Owner


@dataclass(frozen=True)
class Member:
    """A process of the cluster.

    Attributes:
        name: its name, unique in the cluster.
        grpc: its gRPC address for others, HOST:PORT.
        http: its HTTP URL for others.
        run: id of this start, to distinguish two processes of one name.
        draining: whether it gives its models away and takes over none.
        models: number of models that it owns.
        started: when it started, nanoseconds since 1970 by its own clock; for display only.
    """

    name: str
    grpc: str
    http: str
    run: str = ""
    draining: bool = False
    models: int = 0
    started: int = 0

    def owner(self, epoch: int = 0) -> Owner:
        """This process as the owner of a model."""
        return Owner(self.name, self.grpc, self.http, epoch)


@dataclass(frozen=True)
class Claim:
    """The claim of a process to a model, or the release of a claim.

    Attributes:
        owner: the process that claims it; None if the claim was released.
        epoch: grows with every claim and every release.
        heir: the process that should take over a released model; empty = the first in its order.
    """

    owner: Owner | None
    epoch: int
    heir: str = ""

    @property
    def process(self) -> str:
        """The name of the process that owns it; empty if none does."""
        return self.owner.process if self.owner else ""

    def counts_before(self, other: "Claim | None") -> bool:
        """Whether this claim takes precedence over `other`, because it is later or there is no other.

        After a loss of the bucket, two claims may have the same epoch; all processes then choose the same one.
        """
        return other is None or (self.epoch, self.process) > (other.epoch, other.process)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options of a process in a cluster.

    Attributes:
        lease_seconds: others take over the models of a process that has not renewed its lease for this long. It
            renews three times as often, and gives its models up if brokers confirm nothing for this long.
    """

    lease_seconds: float

    @property
    def lease_ns(self) -> int:
        """The lease in nanoseconds."""
        return int(self.lease_seconds * 1e9)

    @property
    def beat_seconds(self) -> float:
        """Seconds between two heartbeats of a process."""
        return self.lease_seconds / 3


@dataclass(frozen=True)
class Entry:
    """A key's value, empty if it was deleted, and its revision, which grows with every change of the bucket."""

    key: str
    value: bytes
    revision: int


class Changed(DeltasyncError):
    """A key has another revision than the writer expects; nothing was written."""


class Bucket(Protocol):
    """A store of a few thousand small entries.

    It may be lost or restored from an old copy, because the log decides. Used in the event loop. All methods raise
    `ServiceUnavailable` if brokers do not answer in time. `put` raises `Changed` if the key has another revision.
    """

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if its revision is still `revision`, 0 for a new key; return the new revision."""

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        """Call `seen` with each entry once before this returns, and from then on with each change.

        No change is skipped, but changes may stop without an error. Replaces an earlier call. Creates a missing
        bucket.
        """

    async def close(self) -> None:
        """Stop following."""


PROCESS, MODEL, CONSUMER = "process", "model", "consumer"
_KINDS = {PROCESS, MODEL, CONSUMER}

# A key consists of non-empty tokens with dots between them. A name may contain dots, except at its beginning, but
# never this character:
_DOT = "="


def key_of(kind: str, name: str) -> str:
    """The key of a process, model or consumer."""
    return f"{kind}.{check_name(kind, name).replace('.', _DOT)}"


def name_of(key: str) -> tuple[str, str]:
    """The kind and the name of a key."""
    kind, _, token = key.partition(".")
    if kind not in _KINDS or "." in token:
        raise InvalidInput(f"key {key!r}: expected one of {', '.join(sorted(_KINDS))}, a dot, and a name")
    return kind, check_name(kind, token.replace(_DOT, "."))


T = TypeVar("T")


_CODECS: dict[type, TypeAdapter[Any]] = {each: TypeAdapter(each) for each in (Member, Claim, str)}


def pack(value: Member | Claim | str) -> bytes:
    """The entry of a process, of a claim, or of a consumer, which is the name of its model."""
    return _CODECS[type(value)].dump_json(value)


def unpack(kind: type[T], value: bytes) -> T:
    """Decode an entry of `pack`. Ignore fields that a later version added."""
    try:
        decoded: T = _CODECS[kind].validate_json(value, strict=True)
    except ValueError as error:
        raise InvalidInput(f"entry of {kind.__name__.lower()} {value!r}: {error}") from error
    return decoded


@dataclass(frozen=True)
class ClusterState:
    """The state of the cluster at one moment, as far as a process knows it.

    Attributes:
        me: the name of this process.
        confirmed: whether brokers confirmed its lease in time.
        members: the processes that are alive, by name.
        claims: the latest claim of each model that this process has seen.
        stored: the claims in the bucket now.
        own: the claims of the models that this process owns, takes over or gives up.
        open: the models of `own` whose logs are open.
        with_log: models that have a log, with or without a claim.
        waiting: models that it failed to take over and will retry later.
    """

    me: str
    confirmed: bool
    members: Mapping[str, Member]
    claims: Mapping[str, Claim]
    stored: Mapping[str, Claim] = field(default_factory=dict)
    own: Mapping[str, Claim] = field(default_factory=dict)
    open: Collection[str] = ()
    with_log: Collection[str] = ()
    waiting: Collection[str] = ()

    def owner_of(self, model: str) -> Owner | None:
        """The owner of a model if it is alive; this process only if it really has the model."""
        claim = self.claims.get(model)
        if claim is None or claim.owner is None:
            return None
        if claim.process == self.me:
            return claim.owner if model in self.own else None
        member = self.members.get(claim.process)
        return replace(claim.owner, grpc=member.grpc, http=member.http) if member else None


@dataclass(frozen=True)
class _LastWord:
    """The last entry of a process, and when it arrived, nanoseconds by this process's clock."""

    member: Member
    revision: int
    at_ns: int


class BucketCopy:
    """A copy of the bucket. Used in the event loop.

    It keeps the latest claims and process entries even if the bucket is lost or restored from an old copy.
    """

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns
        self._revisions = dict[str, int]()
        self._last_words = dict[str, _LastWord]()
        self.claims = dict[str, Claim]()  # The latest of each model.
        self.stored = dict[str, Claim]()  # The claims in the bucket now.
        self.consumers = dict[str, str]()  # Model by name.
        self.stored_consumers = dict[str, str]()
        self.deletions = 0  # Number of deletions of models that it saw.
        self._followed = dict[str, int]()  # Revision by key of the last change that `follow` reported.
        self._epoch = 0

    @property
    def next_epoch(self) -> int:
        """An epoch later than those of all claims so far."""
        return self._epoch + 1

    def revision(self, key: str) -> int:
        """The revision of a key in the bucket; 0 if it has none."""
        return self._revisions.get(key, 0)

    def restart(self) -> None:
        """Begin to read the bucket again."""
        self._followed.clear()
        self._revisions.clear()
        self.stored.clear()
        self.stored_consumers.clear()

    def follow(self, entry: Entry) -> None:
        """Record a change that the bucket reported, not the result of a write."""
        self._followed[entry.key] = entry.revision

    def followed(self, key: str) -> int:
        """The revision of the last change of a key that the bucket reported; 0 without any."""
        return self._followed.get(key, 0)

    def see(self, entry: Entry, now_ns: int) -> None:
        """Copy an entry. If this version cannot read it, copy its revision only and raise `InvalidInput`."""
        if entry.revision <= self.revision(entry.key):
            return
        self._revisions[entry.key] = entry.revision
        kind, name = name_of(entry.key)
        if kind == PROCESS:
            # The same entry again, from a new read of the bucket, does not prove that the process is alive.
            last = self._last_words.get(name)
            if not entry.value:
                self._last_words.pop(name, None)
            elif last is None or last.revision != entry.revision:
                self._last_words[name] = _LastWord(unpack(Member, entry.value), entry.revision, now_ns)
        elif kind == MODEL:
            self._see_model(name, entry.value)
        elif kind == CONSUMER:
            self.stored_consumers.pop(name, None)
            self.consumers.pop(name, None)
            if entry.value:
                self.stored_consumers[name] = self.consumers[name] = unpack(str, entry.value)

    def living(self, now_ns: int) -> dict[str, Member]:
        """The processes that renewed their lease in time, by name."""
        return {name: last.member for name, last in sorted(self._last_words.items()) if self._lives(last, now_ns)}

    def silent(self, now_ns: int) -> list[Member]:
        """The processes whose lease expired without a goodbye, by name."""
        return [last.member for _, last in sorted(self._last_words.items()) if not self._lives(last, now_ns)]

    def silent_seconds(self, process: str, now_ns: int) -> float | None:
        """Seconds since a process last wrote; None if it never did."""
        last = self._last_words.get(process)
        return None if last is None else (now_ns - last.at_ns) / 1e9

    def member(self, process: str) -> Member | None:
        """The last entry of a process, even if its lease expired."""
        last = self._last_words.get(process)
        return None if last is None else last.member

    def _lives(self, last: _LastWord, now_ns: int) -> bool:
        return now_ns - last.at_ns < self._lease_ns

    def _see_model(self, name: str, value: bytes) -> None:
        self.stored.pop(name, None)
        if not value:
            self.claims.pop(name, None)
            self.deletions += 1
            return
        claim = self.stored[name] = unpack(Claim, value)
        self._epoch = max(self._epoch, claim.epoch)
        if claim.counts_before(self.claims.get(name)):
            self.claims[name] = claim
