"""What `make audit` says of what pip-audit found."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[3] / "deploy/locks/audit.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_data_is_said_and_is_no_finding(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([{"name": "a", "skip_reason": "not found"}]) == 0
    assert capsys.readouterr().out.startswith("Nothing was audited")


def test_what_is_sound_is_counted(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.report([{"name": "a", "skip_reason": ""}, {"name": "b", "version": "1", "vulns": []}]) == 0
    assert capsys.readouterr().out == "1 of 2 packages audited, 0 vulnerable\n"


def test_a_vulnerable_package_fails(audit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    vulnerability = {"id": "X-1", "fix_versions": ["2"]}
    assert audit.report([{"name": "b", "version": "1", "vulns": [vulnerability]}]) == 1
    assert capsys.readouterr().out == "b 1: X-1, mended in 2\n1 of 1 packages audited, 1 vulnerable\n"
