"""Replaces attributes of objects, and puts them back."""

from typing import Any

_MISSING = object()


class AttributePatches:
    """Replaced attributes of objects, with the values before.

    A method replaced on one object hides that of its class until it is put back. A module whose `forward` is
    replaced stays where it is, and so do the names of its parameters.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
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
