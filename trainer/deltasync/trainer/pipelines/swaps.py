"""Putting something else in the place of attributes for a while."""

from typing import Any

_MISSING = object()


class Swaps:
    """Attributes of objects that have been replaced, and what they were before.

    A method replaced on one object hides that of its class; taking it away brings that one back. Modules keep
    their place, and so the names of their parameters, whatever is put in the place of their `forward`.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`."""
        self._before.append((owner, name, value, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    @property
    def in_place(self) -> bool:
        """Whether nobody else has replaced one since."""
        return all(vars(owner).get(name, _MISSING) is value for owner, name, value, _ in self._before)

    def undo(self) -> None:
        """Put back what was there before, the last first."""
        while self._before:
            owner, name, _, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
