"""Where tests that concern a GPU run: each body on the CPU too, so that it is known to be right but for the GPU."""

from collections.abc import Iterable

import pytest

CPU_AND_GPU = pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
"""Runs a test once on each, as fixture `device`, which see; see tests/gpu/conftest.py."""


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, and say why."""
    for item in list(items):
        import torch  # Not before: most tests need none of it.

        if not torch.cuda.is_available():
            why = "built without CUDA" if torch.version.cuda is None else "finds no GPU"
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: torch {torch.__version__} {why}"))
