"""What is installed is what the locks name: all of it, in one version, and by the hashes of its files."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

# Each with what it is installed beside.
SETS = {
    "development": ("requirements.lock", "deploy/locks/torch-cpu.lock", "deploy/locks/fbgemm-gpu-cpu.lock"),
    "CUDA": ("requirements.lock", "deploy/locks/torch-cuda.lock", "deploy/locks/fbgemm-gpu.lock"),
    "service": ("deploy/locks/service.lock",),
    "trainer": ("deploy/locks/trainer.lock", "deploy/locks/torch-cpu.lock", "deploy/locks/fbgemm-gpu-cpu.lock"),
    "next TorchRec": ("deploy/locks/torchrec-next.lock",),
    "tools": ("deploy/locks/tools.lock",),
    "build": ("deploy/locks/build.lock",),
}


def _locked(text: str) -> Iterator[tuple[str, Version, list[str]]]:
    """Each package of a lock with its version and its hashes."""
    for entry in re.split(r"(?m)^(?=[a-z0-9])", re.sub(r"(?m)^#.*\n", "", text)):
        if entry:
            name, version = entry.split()[0].split("==")
            yield name, Version(version), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)


@pytest.fixture(scope="module")
def locks(root: Path) -> dict[str, dict[str, Version]]:
    """Of each set the packages with their versions."""
    texts = {name: "".join((root / file).read_text() for file in files) for name, files in SETS.items()}
    return {key: {name: version for name, version, _ in _locked(text)} for key, text in texts.items()}


def _missing(need: str, extras: set[str], lock: dict[str, Version]) -> bool:
    wanted = Requirement(need)
    if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras or {""}):
        return False
    found = lock.get(canonicalize_name(wanted.name))
    return found is None or not wanted.specifier.contains(found, prereleases=True)


def test_every_file_is_held_to_hashes(root: Path) -> None:
    files = {
        "requirements.lock",
        *(f"deploy/locks/{path.name}" for path in (root / "deploy/locks").glob("*.lock")),
    }
    assert files == {file for files in SETS.values() for file in files}
    for file in files:
        assert all(hashes for _, _, hashes in _locked((root / file).read_text())), file


@pytest.mark.parametrize(
    ("key", "extras", "groups"),
    [
        ("development", {"service", "redis"}, ("dev", "torchrec-runtime")),
        ("CUDA", {"service", "trainer", "redis"}, ("dev", "torchrec-runtime")),
        ("service", {"service"}, ()),
        ("trainer", {"service", "trainer"}, ("torchrec-runtime",)),
        ("tools", set(), ("tools",)),
    ],
)
def test_locks_hold_what_the_project_asks_for(
    project: dict[str, Any],
    locks: dict[str, dict[str, Version]],
    key: str,
    extras: set[str],
    groups: tuple[str, ...],
) -> None:
    needs = [] if key == "tools" else [*project["project"]["dependencies"]]
    needs += [need for extra in extras for need in project["project"]["optional-dependencies"][extra]]
    needs += [need for group in groups for need in project["dependency-groups"][group]]
    assert not [need for need in needs if _missing(need, set(), locks[key])], "run make lock"


@pytest.mark.parametrize("key", ["development", "service", "trainer", "build"])
def test_locks_hold_what_their_packages_ask_for(locks: dict[str, dict[str, Version]], key: str) -> None:
    """Nothing is looked up when they are installed, so that nothing may be missing."""
    installed = {canonicalize_name(each.name): each for each in metadata.distributions()}
    needs = [
        (name, need)
        for name, package in installed.items()
        if name in locks[key]
        for need in package.requires or ()
        if _missing(need, set(), locks[key])
    ]
    # fbgemm-gpu-cpu has its files.
    assert [need for need in needs if need != ("torchrec", "fbgemm-gpu")] == []


def test_a_package_has_one_version_in_all_locks(locks: dict[str, dict[str, Version]]) -> None:
    together = ("development", "CUDA", "service", "trainer", "build")
    for name in set().union(*(locks[key] for key in together)):
        assert len({locks[key][name].public for key in together if name in locks[key]}) == 1, name


def test_the_service_is_installed_without_torch_and_what_tests_it(locks: dict[str, dict[str, Version]]) -> None:
    assert not locks["service"].keys() & {"torch", "torchrec", "pytest", "ruff"}
    assert not locks["trainer"].keys() & {"pytest", "ruff"}


def _sbom(root: Path, lock: Path, tool: Callable[[str], str]) -> str:
    command = [sys.executable, "-W", "ignore", tool("cyclonedx-py"), "requirements", "--output-reproducible"]
    command += ["--pyproject", str(root / "pyproject.toml"), str(lock)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.nightly
def test_the_bill_of_materials_holds_the_lock_and_is_the_same_each_time(
    root: Path, tool: Callable[[str], str]
) -> None:
    lock = root / "deploy/locks/build.lock"
    text = _sbom(root, lock, tool)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert _sbom(root, lock, tool) == text
    components = {
        each["name"]: (
            Version(each["version"]),
            [one["content"] for reference in each["externalReferences"] for one in reference["hashes"]],
        )
        for each in json.loads(text)["components"]
    }
    locked = {name: (version, hashes) for name, version, hashes in _locked(lock.read_text())}
    assert components == locked


def test_make_lists_every_lock_that_is_deployed(root: Path) -> None:
    listed = set(re.findall(r"(?m)^SBOM_\w+ = (.*)$", (root / "Makefile").read_text()))
    assert {tuple(line.split()) for line in listed} == {
        SETS["service"],
        ("deploy/locks/trainer.lock", "deploy/locks/torch-cuda.lock", "deploy/locks/fbgemm-gpu.lock"),
        SETS["development"],
    }
