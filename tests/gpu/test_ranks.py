"""Several ranks on one device, and the programs that choose a device by themselves."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.devices import CANNOT_SHARE, CUDA, needs
from tests.support.process import ServiceProcess
from tests.support.programs import run_program
from tests.support.ranks import run_ranks
from torch import nn

from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions

needs(
    "deltasync.cli.main",
    "deltasync.service.service",
    "deltasync.trainer.sync",
    "deltasync.trainer.example.demo",
    "tests.bench.__main__",
)

RANKS = Path(__file__).with_name("ranks.py")


# On the CPU, the tests of the trainer cover the same by day.
@pytest.mark.parametrize("kind", [pytest.param("cpu", marks=pytest.mark.nightly), CUDA])
def test_what_two_ranks_of_one_device_publish_arrives(kind: str, service: ServiceProcess) -> None:
    try:
        run_ranks(str(RANKS), kind, service.grpc)
    except AssertionError as failure:
        said = str(failure)
        if kind == "cuda" and CANNOT_SHARE in said:
            pytest.skip(said[said.index(CANNOT_SHARE) :].splitlines()[0])
        raise
    torch.manual_seed(0)
    expected, target = nn.Linear(5, 3), NumpyTarget()
    with torch.no_grad():
        for step in range(7):
            for parameter in expected.parameters():
                parameter.add_(step)
    options = SubscriberOptions(service=service.grpc, consumer="predictors", replica="p0")
    with Subscriber(options, target) as replica:
        replica.wait_for(1, 30)
        with target.reading() as reading:
            np.testing.assert_array_equal(reading.tables["weight"], expected.weight.detach().numpy())


def figures_of(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    found = tmp_path / "figures.json"
    done = run_program(sys.executable, "-m", "tests.bench", *arguments, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(found.read_text())
    return result


@pytest.mark.gpu
def test_the_pipelines_benchmark_trains_on_the_gpu(tmp_path: Path) -> None:
    sizes = {"ranks": 1, "batch-size": 16, "rows": 400, "dim": 8, "steps": 4, "rounds": 2}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    figures = figures_of(tmp_path, "pipelines", *options)
    assert figures["device"] == "cuda"
    assert all(line["step_ms"] > 0 for line in figures["variants"].values())
