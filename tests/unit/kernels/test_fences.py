"""The fence reaches the processor."""

import numba

from deltasync.kernels.fences import fence


def test_a_fence_is_compiled_and_orders_everything() -> None:
    fence()
    again = numba.njit(fence.function)
    again()
    [code] = again.inspect_llvm().values()
    assert "fence seq_cst" in code
