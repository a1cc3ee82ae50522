"""Devices for GPU tests: each test also runs on the CPU, to check everything except the GPU itself."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
CPU_AND_GPU = pytest.mark.parametrize("kind", ["cpu", CUDA])
"""Runs a test once on each; `device_of` says where that is."""


CANNOT_SHARE = "ranks cannot share the GPU: "
"""What a rank says where NCCL refuses."""


def device_of(kind: str) -> torch.device:
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def needs(*modules: str) -> None:
    """Skip a file's tests if a module of ours cannot be imported, for example because TorchRec is missing."""
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            pytest.skip(f"{name} cannot be imported: {error}", allow_module_level=True)


def skip_without_gpu(items: Iterable[pytest.Item]) -> None:
    """Skip tests that need a GPU if there is none, with the reason."""
    if torch.cuda.is_available():
        return
    why = "is built without CUDA" if torch.version.cuda is None else "finds no GPU"
    for item in items:
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: torch {torch.__version__} {why}"))


@contextmanager
def no_waiting(kind: str) -> Iterator[None]:
    """Raise if the host waits for a GPU in the block, for example for a copy or a count of non-zero values."""
    if kind == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def lone_rank(kind: str) -> Iterator[torch.device]:
    """Join a process group with only this process, like `join_ranks`."""
    device, store = device_of(kind), dist.HashStore()  # type: ignore[attr-defined]
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def stream_on(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream on the device; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch the work of the block on a stream."""
    return torch.cuda.stream(stream) if stream else nullcontext()
