"""Instructions for which numba has no name. Imported when something is compiled, see `callees.intrinsic`."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _asking(*, written: bool) -> Any:
    """What asks for the line of memory that has a byte of an array. Nothing else comes of it, wherever that is."""

    def ask(_context: Any, array: Any, byte: Any) -> Any:  # noqa: ARG001  # It is told what types these are.
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            asked = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
            prefetch = cgutils.get_or_insert_function(builder.module, asked, "llvm.prefetch.p0")
            where = builder.gep(builder.bitcast(data, pointer), [args[1]])
            builder.call(prefetch, [where, *(number(each) for each in (int(written), 3, 1))])
            return context.get_dummy_value()

        return types.void(array, types.uint64), generate

    return intrinsic(ask)


ask, ask_to_write = _asking(written=False), _asking(written=True)
