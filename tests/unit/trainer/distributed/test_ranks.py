"""Where a rank trains."""

import pytest

from deltasync.trainer.distributed.ranks import choose_device


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "cuda_kernels", "kind", "reason"),
    [
        (0, 2, True, "cpu", "no GPU"),
        (8, 2, False, "cpu", "make install CUDA=1"),
        (1, 2, True, "cpu", "2 ranks need a GPU each, but there are only 1"),
        (2, 2, True, "cuda", "a GPU each"),
    ],
)
def test_a_gpu_each_or_none(gpus: int, local_ranks: int, cuda_kernels: bool, kind: str, reason: str) -> None:
    chosen, why = choose_device(gpus, local_ranks, cuda_kernels)
    assert chosen == kind
    assert reason in why
