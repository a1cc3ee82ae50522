"""Replaces attributes of objects, and puts them back."""

from typing import Any

_MISSING = object()


class AttributePatches:
    """Attributes that were replaced on objects, with their earlier values.

    Replacing the `forward` of a module, instead of wrapping the module, keeps the names of its parameters.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`."""
        self._before.append((owner, name, value, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    @property
    def in_place(self) -> bool:
        """Whether all replacements are still in place."""
        return all(vars(owner).get(name, _MISSING) is value for owner, name, value, _ in self._before)

    def undo(self) -> None:
        """Put the earlier values back, in reverse order."""
        while self._before:
            owner, name, _, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
