"""The processes of one service, as they tell each other of themselves, their claims, and their leases."""

from dataclasses import dataclass

from deltasync.base.errors import InvalidInput, Owner


@dataclass(frozen=True)
class Member:
    """A process of the service.

    Attributes:
        name: its name among the processes of the service.
        grpc: where others reach it by gRPC, HOST:PORT.
        http: where others reach it by HTTP, a URL.
        run: made anew each time it starts: tells two processes of one name apart.
        draining: it gives its models away, and takes none.
        models: how many it owns.
        started: when it was started, nanoseconds since 1970, by its own clock; for people.
    """

    name: str
    grpc: str
    http: str
    run: str = ""
    draining: bool = False
    models: int = 0
    started: int = 0

    def owner(self, epoch: int = 0) -> Owner:
        """It as the owner of a model."""
        return Owner(self.name, self.grpc, self.http, epoch)


@dataclass(frozen=True)
class Claim:
    """Who owns a model; or that nobody does, and who is to.

    Attributes:
        owner: who claims it; None: it was given up.
        epoch: grows with every claim and with every giving up.
        heir: the process that is to have it after it was given up; empty: whoever is chosen.
    """

    owner: Owner | None
    epoch: int
    heir: str = ""

    @property
    def process(self) -> str:
        """The name of the process that owns it; empty if none does."""
        return self.owner.process if self.owner else ""

    def counts_before(self, other: "Claim | None") -> bool:
        """Whether it is the later one of two, or the only one. Of two that were made with one epoch, while the
        bucket was lost, all processes take the same one for the later.
        """
        return other is None or (self.epoch, self.process) > (other.epoch, other.process)


@dataclass(frozen=True, kw_only=True)
class OwnershipOptions:
    """How a process takes part in owning models.

    Attributes:
        lease_seconds: after so long without a word of a process, others take its models; it speaks three times as
            often, and gives them up by itself when nobody confirms to have heard it for as long.
        taking_at_once: how many models are taken at the same time; more of them wait.
    """

    lease_seconds: float = 6.0
    taking_at_once: int = 4

    def __post_init__(self) -> None:
        if not 0.05 <= self.lease_seconds <= 3600:
            raise InvalidInput(f"lease_seconds {self.lease_seconds}: expected 0.05 to 3600")
        if self.taking_at_once < 1:
            raise InvalidInput(f"taking_at_once {self.taking_at_once}: expected 1 or more")

    @property
    def lease_ns(self) -> int:
        """The lease in nanoseconds."""
        return int(self.lease_seconds * 1e9)

    @property
    def beat_seconds(self) -> float:
        """How often a process speaks."""
        return self.lease_seconds / 3
