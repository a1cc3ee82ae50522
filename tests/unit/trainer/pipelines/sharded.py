"""A stand-in for sharded modules."""

from typing import Any

from torchrec.distributed.types import ShardedModule


class Sharded(ShardedModule):  # type: ignore[misc]  # torchrec's types are not followed
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> int:
        self.called = args, kwargs
        return 0

    def create_context(self) -> Any: ...

    def input_dist(self, *args: Any, **kwargs: Any) -> Any: ...

    def compute(self, *args: Any, **kwargs: Any) -> Any: ...

    def output_dist(self, *args: Any, **kwargs: Any) -> Any: ...

    @property
    def unsharded_module_type(self) -> Any: ...
