"""The README's examples run as they are, against a real service."""

import re
from pathlib import Path

import pytest
from tests.support.process import ServiceProcess

README = (Path(__file__).parents[3] / "README.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- run: (\w+) -->\n```python\n(.*?)```", README, re.DOTALL))


def run(name: str, service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> str:
    code = EXAMPLES[name].replace("localhost:50051", service.grpc)
    assert service.grpc in code
    exec(compile(code, f"README {name}", "exec"), {})  # noqa: S102
    return capsys.readouterr().out


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == {"publisher", "numpy", "torch", "callback"}
    assert all(len(code.splitlines()) <= 13 for code in EXAMPLES.values())


def test_the_examples_run(service: ServiceProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert "number=1" in run("publisher", service, capsys)
    assert "[1. 1. 1." in run("numpy", service, capsys)
    assert "tensor([1., 1." in run("torch", service, capsys)
    assert "1 user [  0   1   2" in run("callback", service, capsys)
