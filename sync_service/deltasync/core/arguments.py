"""Checks of what a program passes where users enter: an argument of another type is named at once."""

from collections.abc import Iterable


def check_type(call: str, name: str, value: object, *kinds: type, remedy: str = "") -> None:
    """Check the type of an argument.

    Args:
        call: the call as it should be written: `Subscriber(options, target)`.
        name: the argument's.
        value: what was passed.
        kinds: the types that it may have.
        remedy: what else to do.

    Raises:
        TypeError: it has none of these types.
    """
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{call}: {name} is {described(value)}, expected {expected}{remedy and f': {remedy}'}")


def check_items(call: str, name: str, values: object, kind: type) -> None:
    """Check that an argument is several things of one type, see `check_type`."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{call}: {name} is {described(values)}, expected a list of {kind.__name__}")
    for each in values:
        check_type(call, f"an item of {name}", each, kind)


def described(value: object) -> str:
    """What an argument is, for an error."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "None" if value is None else f"of type {type(value).__name__}"
