"""Words that have a name for people and a number in messages."""

from enum import Enum
from typing import Any, Self


class Numbered(Enum):
    """An enum whose members are declared as name, number, and what else belongs to one.

    Attributes:
        value: the name, as people write it; `kind(name)` finds the member.
        number: what it is in messages, in which 0 is nothing said.
    """

    _value_: str
    number: Any  # The stubs have a type of their own for the numbers of each enum.

    # Type checkers take `kind(name)` for a call of this: hence the default.
    def __new__(cls, name: str, number: int = 0, *_: object) -> Self:
        """A member."""
        member = object.__new__(cls)
        member._value_ = name
        member.number = number
        return member

    @classmethod
    def of_number(cls, number: int) -> Self | None:
        """The member that has a number, or None."""
        return next((member for member in cls if member.number == number), None)
