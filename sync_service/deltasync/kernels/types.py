"""Types of what kernels take and return, in numba's words: who imports kernels need not import numba."""


class Type(str):
    """A type. Called with those of arguments: the signature of a function that returns it."""

    __slots__ = ()

    def __call__(self, *arguments: str) -> str:
        """Such as `void(int64, int64)`."""
        return f"{self}({', '.join(arguments)})"


void = Type("void")
boolean = Type("boolean")
uint8, uint16, uint32, uint64 = Type("uint8"), Type("uint16"), Type("uint32"), Type("uint64")
int32, int64 = Type("int32"), Type("int64")
float32, float64 = Type("float32"), Type("float64")


def tuple_of(*types: Type) -> Type:
    """What a kernel returns that returns several numbers."""
    return Type(f"Tuple(({', '.join(types)},))")
