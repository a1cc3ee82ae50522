"""A memory fence, for memory that other processes read meanwhile. Python has none."""

from typing import Any

from deltasync.kernels.compiled import Callee, kernel, void


def _fencing() -> Any:
    from numba import types
    from numba.extending import intrinsic

    def put(_context: Any) -> Any:  # Numba passes it.
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(put)


_put: Any = Callee(_fencing)


@kernel(void(), nogil=False)
def fence() -> None:
    """Let this thread's earlier reads and writes come before its later ones."""
    _put()
