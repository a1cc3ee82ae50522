"""What peers may take of the service: each limit with its default, its name, and how much of it is taken."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from deltasync.core.errors import InvalidInput, LimitReached


def _limit(most: int, what: str) -> Any:
    return field(default=most, metadata={"what": what})


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits. Each field's metadata says of `what` it is the largest number."""

    models: int = _limit(1_000, "models")
    tables_per_model: int = _limit(10_000, "tables of a model")
    bytes_per_model: int = _limit(16 << 40, "bytes of a model's tables")
    bytes_in_all: int = _limit(64 << 40, "bytes of all models' tables")
    consumers: int = _limit(2_000, "consumers")
    replicas_per_consumer: int = _limit(5_000, "replicas of a consumer")

    def __post_init__(self) -> None:
        for name, most in vars(self).items():
            if type(most) is not int or most < 1:
                raise InvalidInput(f"limit {name}: {most!r}, expected a whole number from 1 on")

    @classmethod
    def described(cls, settings: object) -> "LimitOptions":
        """The limits that a table of a configuration describes; those that it leaves out have their defaults.

        Raises:
            InvalidInput: a limit that there is not, or that is no number.
        """
        if not isinstance(settings, Mapping):
            raise InvalidInput("limits: expected a table of limits by name")
        known = [each.name for each in fields(cls)]
        if unknown := sorted(settings.keys() - set(known)):
            raise InvalidInput(f"unknown limit {unknown[0]!r}; limits: {', '.join(known)}")
        return cls(**settings)


class Limits:
    """The limits, and how much of those is taken that count what there is in all. Used in the event loop.

    Attributes:
        options: the limits; replaced when the configuration is read again, which takes nothing from who has it.
        taken: how much there is, by the limit's name.
    """

    def __init__(self, options: LimitOptions | None = None) -> None:
        self.options = options or LimitOptions()
        self.taken = Counter[str]()

    def check(self, name: str, number: int) -> None:
        """Check that there may be so many of what a limit is of.

        Raises:
            LimitReached: there may not; the message names the limit.
        """
        most = getattr(self.options, name)
        if number > most:
            raise LimitReached(f"{_what(name)}: {number}, at most {most} are allowed (limit {name})")

    @contextmanager
    def taking(self, name: str, number: int = 1) -> Iterator[None]:
        """Take some of what there is in all, while the block runs.

        Raises:
            LimitReached: there would be too many.
        """
        self.check(name, self.taken[name] + number)
        self.taken[name] += number
        try:
            yield
        finally:
            self.taken[name] -= number


def _what(name: str) -> str:
    return next(str(each.metadata["what"]) for each in fields(LimitOptions) if each.name == name)
