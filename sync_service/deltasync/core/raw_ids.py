"""Raw ids of managed collision as a map has them: 0 where a row is free, and another number for every raw id."""

import numpy as np
from numpy.typing import NDArray

# TorchRec's mark of a free row in a sorted map. No row has it as its raw id.
FREE_ID = np.iinfo(np.int64).max


def entries_of(raw_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The entries of raw ids ([n] int64, also negative ones) in a map; 0 for `FREE_ID`."""
    return raw_ids ^ FREE_ID


def raw_ids_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """The raw ids of entries ([n]) of a map; `FREE_ID` for 0."""
    return entries ^ FREE_ID
