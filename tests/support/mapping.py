"""Whether arrays are in memory or in files."""

from typing import Any

from deltasync.storage.mapping import Mapping


def in_a_file(array: Any) -> bool:
    """Whether an array is in a mapping, or cut out of one that is."""
    while array is not None and not isinstance(array, Mapping):
        array = getattr(array, "base", None)
    return array is not None
