"""Processes of a cluster, claims to models, and options of leases."""

from dataclasses import dataclass

from deltasync.base.errors import Owner


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
