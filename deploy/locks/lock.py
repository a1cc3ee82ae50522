"""Writes the locks: versions of all that is installed, with the hashes of their files.

python deploy/locks/lock.py [--upgrade]

What `make lock` runs. A version that a lock names stays until its needs change, or with `--upgrade`. They are for
Linux on x86-64, as the wheels of fbgemm are. The index is uv's: `UV_DEFAULT_INDEX` names another.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "deploy/locks"
WORK = ROOT / "build/lock"
UV = Path(sys.executable).with_name("uv")
HEADER = "# Made by `make lock`.\n"
# FBGEMM is built for one release of torch, and its metadata does not say which: these three go together.
PINS = ("torch==2.13.0", "torchrec==1.8.0", "fbgemm-gpu==1.8.0")
# `make nightly` runs the trainer's tests on this release, too.
NEXT_TORCHREC = "torchrec==1.9.2"
# Builds without CUDA come from PyTorch's own index, so uv does not find their hashes.
CPU_BUILDS = {"2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}

Entries = dict[str, str]


def _entries(text: str) -> Entries:
    """Of each package its lines."""
    blocks = re.split(r"(?m)^(?=[a-z0-9])", text)
    return {block.partition("==")[0]: block for block in blocks if "==" in block}


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _compile(name: str, *arguments: str, kept: str) -> Entries:
    """What uv resolves, near what was `kept`."""
    path = WORK / f"{name}.lock"
    path.write_text(kept)
    options = "--quiet --generate-hashes --no-annotate --no-header --python-version 3.11 --python-platform linux"
    command = [str(UV), "pip", "compile", *options.split(), "--output-file", str(path), *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    return _entries(path.read_text())


def _write(path: Path, entries: Entries, wanted: Callable[[str], bool] = bool) -> None:
    path.write_text(HEADER + "".join(block for name, block in entries.items() if wanted(name)))


# The log among brokers, and copies of checkpoints in object storage, are a matter of settings.
_SERVICE = ("--extra", "service", "--extra", "jetstream", "--extra", "s3")


def _is_torch(name: str) -> bool:
    return name == "torch" or name.startswith(("nvidia-", "cuda-", "triton"))


def _is_common(name: str) -> bool:
    return not _is_torch(name) and name != "fbgemm-gpu"


def _cpu_build(torch: str) -> Entries:
    version = torch.split()[0].partition("==")[2]
    if version not in CPU_BUILDS:
        sys.exit(f"torch {version}: add the hash of its build without CUDA to {Path(__file__).name}")
    return {"torch": f"torch=={version}+cpu --hash=sha256:{CPU_BUILDS[version]}\n"}


def main(arguments: list[str]) -> None:
    """Write them all."""
    WORK.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (WORK / "pins.txt").write_text("\n".join(PINS))
    (WORK / "fbgemm-cpu.in").write_text(PINS[2].replace("gpu", "gpu-cpu"))
    (WORK / "torchrec-next.in").write_text(NEXT_TORCHREC)
    (WORK / "build.in").write_text("\n".join(project["build-system"]["requires"]))

    parts = [ROOT / "requirements.lock", *(LOCKS / f"{name}.lock" for name in ("torch-cuda", "fbgemm-gpu"))]
    runtime = ["--extra", "service", "--extra", "trainer", "--extra", "s3", "--group", "torchrec-runtime"]
    everything = [*runtime, "--group", "dev", "--constraint", str(WORK / "pins.txt"), *arguments]
    found = _compile("all", "pyproject.toml", *everything, kept="".join(map(_read, parts)))
    for path, test in zip(parts, (_is_common, _is_torch, "fbgemm-gpu".__eq__), strict=True):
        _write(path, found, test)
    _write(LOCKS / "torch-cpu.lock", _cpu_build(found["torch"]))

    # Parts of it, in the same versions.
    same = ["--constraint", str(WORK / "all.lock")]
    _write(LOCKS / "build.lock", _compile("build", str(WORK / "build.in"), *same, kept=""))
    _write(LOCKS / "service.lock", _compile("service", "pyproject.toml", *same, *_SERVICE, kept=""))
    _write(LOCKS / "trainer.lock", _compile("trainer", "pyproject.toml", *same, *runtime, kept=""), _is_common)

    cpu, tools = LOCKS / "fbgemm-gpu-cpu.lock", LOCKS / "tools.lock"
    _write(cpu, _compile("fbgemm-cpu", str(WORK / "fbgemm-cpu.in"), "--no-deps", kept=""))
    following = _compile("torchrec-next", str(WORK / "torchrec-next.in"), "--no-deps", kept="")
    _write(LOCKS / "torchrec-next.lock", following)
    _write(tools, _compile("tools", "--group", "tools", *arguments, kept=_read(tools)))


if __name__ == "__main__":
    main(sys.argv[1:])
