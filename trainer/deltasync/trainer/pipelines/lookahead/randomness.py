"""The generators of random numbers: comparing their states, and putting them back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states() -> list[Any]:
    """The states of torch's, Python's and NumPy's generators, to be compared."""
    of_torch = [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus())]
    return [*(state.tolist() for state in of_torch), random.getstate(), repr(np.random.get_state())]


@contextmanager
def random_states_preserved() -> Iterator[None]:
    """Draw after this as if nothing had been drawn within."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(_gpus()):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_available() else []
