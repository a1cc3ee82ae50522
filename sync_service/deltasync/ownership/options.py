"""How a process takes part in owning models."""

from dataclasses import dataclass

from deltasync.core.errors import InvalidInput


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
