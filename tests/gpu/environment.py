"""Which versions `make test-gpu` meets, what is missing, and the command's entry points without an installation.

    python tests/gpu/environment.py FOLDER

writes into FOLDER what `pip install` would say of the package, for FOLDER on PYTHONPATH: nothing is installed.
"""

import platform
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "numba": "numba",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Modules without which nothing runs, and what has them."""
SHOWN = (*NEEDED.values(), "torchrec", "fbgemm-gpu", "fbgemm-gpu-nightly", "fbgemm-gpu-cpu", "tensordict")


def main(folder: Path) -> None:
    """Print the versions, and end if something is missing."""
    found = [
        f"python {platform.python_version()}",
        *(f"{name} {_version(name)}" for name in SHOWN if _version(name)),
    ]
    sys.stdout.write(", ".join(found) + "\n")
    missing = [package for module, package in NEEDED.items() if not _is_there(module)]
    if missing:
        sys.exit(f"{sys.executable} lacks: pip install {' '.join(missing)}")
    _write_entry_points(folder)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _write_entry_points(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
