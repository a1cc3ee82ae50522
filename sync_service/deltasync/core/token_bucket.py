"""How often something may be done: a bucket whose tokens come at a rate, and that holds those of one second."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenBucket:
    """What is left of one: `tokens`, at the time `seconds` of a clock that is never set back."""

    tokens: float
    seconds: float

    @classmethod
    def full(cls, rate: int, now: float) -> "TokenBucket":
        """One from which nothing was taken."""
        return cls(float(rate), now)

    def take(self, rate: int, now: float) -> "TokenBucket | None":
        """What is left once one token is taken; None where there is none, and nothing is taken.

        Args:
            rate: tokens that come in a second, and the most that it holds.
            now: the time, not before that of this one.
        """
        tokens = min(float(rate), self.tokens + (now - self.seconds) * rate)
        return TokenBucket(tokens - 1, now) if tokens >= 1 else None

    def is_full(self, rate: int, now: float) -> bool:
        """Whether it is as one from which nothing was taken."""
        return self.tokens + (now - self.seconds) * rate >= rate
