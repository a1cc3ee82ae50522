"""What `pip install` leaves: one package, a client that needs little, and a command that says what is missing."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deltasync.cli.output import SERVICE, TRAINER

ROOT = Path(__file__).parents[3]
# What the extras bring: a predictor that imports the client has none of it.
EXTRAS = ("click", *SERVICE, *TRAINER)
BLOCKED = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is unpacked into, as pip does."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(
    installed: Path, folder: Path, *arguments: str, without_extras: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Python in `folder` with the wheel before all else; `without_extras` hides what only extras install."""
    if without_extras:
        (folder / "sitecustomize.py").write_text(BLOCKED)
    environment = {"PYTHONPATH": f"{folder}:{installed}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_one_package_and_its_stubs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"deltasync", "deltasync-0.1.0.dist-info"}
    assert {"deltasync/py.typed", "deltasync/v1/tables_pb2.py", "deltasync/trainer/example/train.py"} <= set(names)
    assert "deltasync/client/shared/deltasync_shared.h" in names
    assert "deltasync/__init__.py" not in names
    assert not [name for name in names if name.split("/")[1] in ("bench", "soak") or "/tests/" in name]


@pytest.mark.parametrize("name", ["trainer", "sync_service"])
def test_nothing_of_ours_has_a_common_name(installed: Path, tmp_path: Path, name: str) -> None:
    done = run(installed, tmp_path, "-c", f"import {name}")
    assert f"No module named '{name}'" in done.stderr


@pytest.mark.nightly
def test_a_trainer_beside_a_users_script_does_no_harm(installed: Path, tmp_path: Path) -> None:
    for name in ("trainer", "sync_service"):
        (tmp_path / f"{name}.py").write_text(f"MINE = {name!r}\n")
    (tmp_path / "script.py").write_text(
        "import sync_service, trainer\n"
        "from deltasync.trainer.sync import DeltaSync, SyncOptions\n"
        "import deltasync.api.process\n"
        "print(trainer.MINE, sync_service.MINE, DeltaSync.__module__)\n"
    )
    done = run(installed, tmp_path, "script.py")
    assert done.stdout == "trainer sync_service deltasync.trainer.sync\n", done.stderr


def test_the_client_needs_no_extra(installed: Path, tmp_path: Path) -> None:
    """Publish and subscribe: all that a predictor, or a trainer of another kind, imports."""
    code = (
        "import deltasync.client as client\n"
        "[getattr(client, name) for name in client.__all__]\n"
        "import deltasync.client.admin\n"
        "print(client.__file__)\n"
    )
    done = run(installed, tmp_path, "-c", code, without_extras=True)
    assert done.stdout == f"{installed}/deltasync/client/__init__.py\n", done.stderr


def test_the_command_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "deltasync", "lag", "predictors", without_extras=True)
    assert (done.returncode, done.stdout) == (1, "")
    install = "pip install 'deltasync[service]', or '.[service]' in a checkout"
    assert done.stderr == f"Error: the deltasync command needs click: {install}\n"


@pytest.mark.parametrize(
    ("verb", "missing", "extras"), [("serve", "fastapi", "service"), ("demo", "rich", "service,trainer")]
)
def test_a_verb_says_what_to_install(
    installed: Path, tmp_path: Path, verb: str, missing: str, extras: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.replace(str(EXTRAS), str((missing,))))
    done = run(installed, tmp_path, "-m", "deltasync", verb, "--some-option")
    assert done.returncode == 1
    install = f"pip install 'deltasync[{extras}]', or '.[{extras}]' in a checkout"
    assert done.stderr == f"Error: deltasync {verb} needs {missing}: {install}\n"
    assert "Not available" in run(installed, tmp_path, "-m", "deltasync", "--help").stdout
