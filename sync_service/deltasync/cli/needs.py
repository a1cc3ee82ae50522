"""What a verb needs beyond the client, which an extra installs."""

from importlib.util import find_spec

SERVICE = ("fastapi", "grpc_health", "grpc_reflection", "lmdb", "prometheus_client", "uvicorn", "xxhash")
TRAINER = ("rich", "tensordict", "torch", "torchrec")


def check_needs(*modules: str) -> None:
    """Find modules without importing them: that would take seconds, and help needs none of them.

    Raises:
        ModuleNotFoundError: the first that is not there.
    """
    for name in modules:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
