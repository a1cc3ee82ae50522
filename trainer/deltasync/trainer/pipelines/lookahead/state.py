"""What a preprocessing module's results depend on, beside its arguments."""

from typing import Any

from torch import nn

from deltasync.trainer.pipelines.lookahead.calls import is_same


class Eras:
    """Counts what others do to a module's own attributes; what it does to them itself is part of its calls.

    Not seen are changes within an attribute, say of the items of a list, and those made while the module is called
    by way of its own forward, where they may be its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._state, self._era = _state(module), 0

    def now(self) -> int:
        """The number of the era."""
        state = _state(self._module)
        if not is_same(self._state, state):
            self._state, self._era = state, self._era + 1
        return self._era

    def called(self) -> None:
        """The module has just been called."""
        self._state = _state(self._module)


def _state(module: nn.Module) -> list[Any]:
    own = [value for one in module.modules() for name, value in vars(one).items() if name != "forward"]
    return [*own, *module.buffers()]
