"""The TorchRec side: tracking, publishing, the click model and the torchrun entry."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltasync.trainer.exports import load_export

__all__ = ["load_export"]


def __getattr__(name: str) -> Any:
    """Import torch only on use, because commands with `--help` import this package."""
    if name != "load_export":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltasync.trainer.exports import load_export

    return load_export
