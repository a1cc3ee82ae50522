"""One flipped bit in a file of a table."""

import random
from pathlib import Path

import numpy as np


def flip_bit(models: Path, pick: float) -> str:
    """Flip a bit of some file below a folder, where that has something; which, and at what byte.

    Args:
        models: the folder.
        pick: from 0 to below 1: which bit; the same of the same files.
    """
    rng = random.Random(pick)  # to be repeated, not to be secret
    files = [file for file in sorted(models.rglob("*")) if file.is_file()]
    while files:
        file = files.pop(rng.randrange(len(files)))
        used = np.flatnonzero(np.fromfile(file, np.uint8))  # There may be room for more rows.
        if len(used):
            at = int(used[rng.randrange(len(used))])
            with file.open("r+b") as opened:
                opened.seek(at)
                byte = opened.read(1)[0]
                opened.seek(at)
                opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
            return f"{file.name}, byte {at}"
    return "nothing"
