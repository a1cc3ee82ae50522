"""What is written down of a model's owner."""

from dataclasses import dataclass

from deltasync.core.owner import Owner


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
