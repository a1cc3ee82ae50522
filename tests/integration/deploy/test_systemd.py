import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def runnable(deploy: Path, tmp_path: Path) -> Path:
    """The unit with a command that is there, which `verify` asks for."""
    text = (deploy / "systemd/deltasync.service").read_text().replace("\\\n", " ")
    path = tmp_path / "deltasync.service"
    path.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text))
    return path


def _analyze(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True)


def test_systemd_understands_every_line(runnable: Path, tool: Callable[[str], str]) -> None:
    analyze = tool("systemd-analyze")
    done = _analyze(analyze, "verify", runnable)
    # An unknown key is only a warning, with status 0.
    assert (done.returncode, done.stderr) == (0, "")
    runnable.write_text(runnable.read_text().replace("StateDirectory=", "StateFolder="))
    assert "StateFolder" in _analyze(analyze, "verify", runnable).stderr


def test_unit_is_confined(runnable: Path, tool: Callable[[str], str]) -> None:
    done = _analyze(tool("systemd-analyze"), "security", "--offline=yes", "--threshold=20", runnable)
    assert done.returncode == 0, done.stdout


def test_data_is_in_the_state_directory(unit: list[tuple[str, str]]) -> None:
    settings = dict(unit)
    assert ("Environment", f"DELTASYNC_DATA_DIR=%S/{settings['StateDirectory']}") in unit


def test_readme_installs_what_the_unit_reads(deploy: Path, unit: list[tuple[str, str]]) -> None:
    settings = dict(unit)
    program, *arguments = shlex.split(settings["ExecStart"])
    readme = (deploy / "README.md").read_text()
    assert f"python3.11 -m venv {Path(program).parents[1]}\n" in readme
    files = [argument for argument in arguments if argument.startswith("/etc/")]
    files += [settings["EnvironmentFile"].removeprefix("-")]
    files += [value.split(":")[1] for key, value in unit if key == "LoadCredential"]
    assert len(files) == 8
    for file in files:
        assert re.search(rf"(?m)^install .* {re.escape(file)}$", readme), file


def test_the_service_reads_the_roles_that_only_its_group_may_read(
    deploy: Path, unit: list[tuple[str, str]]
) -> None:
    group = dict(unit)["SupplementaryGroups"]
    lines = (deploy / "README.md").read_text().splitlines()
    assert f"groupadd --system {group}" in lines
    assert [line for line in lines if line.startswith(f"install --group {group} --mode 0640 ")]


def test_credentials_are_those_that_the_command_names(unit: list[tuple[str, str]]) -> None:
    named = set(re.findall(r"%d/(\S+)", dict(unit)["ExecStart"]))
    assert named == {value.split(":")[0] for key, value in unit if key == "LoadCredential"}
    assert dict(unit)["LimitCORE"] == "0"
