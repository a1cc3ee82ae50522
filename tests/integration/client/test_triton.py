"""The example for Triton's Python backend, in several instances, called by a stand-in of the backend."""

import json
import re
import runpy
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.programs import ROOT

from deltasync.client import Position, Release, RowBatch, Shard, TableSpec
from deltasync.client.shared import layout
from deltasync.client.shared.target import SharedTarget
from deltasync.core.rows import Ids

FOLDER = ROOT / "sync_service/examples/triton/clicks"
ROWS, DIM = 30, 8
USER, ITEM = TableSpec("user", ROWS, DIM), TableSpec("item", ROWS, DIM)


class TritonError(Exception):
    UNAVAILABLE, INVALID_ARG = "unavailable", "invalid"

    def __init__(self, message: str, code: str = "unknown") -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Tensor:
    name: str
    array: Any

    def as_numpy(self) -> Any:
        return self.array


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] | None = None
    error: TritonError | None = None


def input_of(request: list[Tensor], name: str) -> Tensor:
    return next(each for each in request if each.name == name)


BACKEND = SimpleNamespace(
    Tensor=Tensor,
    TritonError=TritonError,
    InferenceResponse=InferenceResponse,
    get_input_tensor_by_name=input_of,
)


def model_of(parameters: dict[str, str]) -> Any:
    """The example's model, initialised."""
    model = runpy.run_path(str(FOLDER / "1/model.py"))["TritonPythonModel"]()
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    model.initialize({"model_config": json.dumps(config), "model_instance_kind": "CPU"})
    return model


def instance(channel: Connection, parameters: dict[str, str]) -> None:
    """A process that serves batches of requests, each of users and items, until it is told None."""
    sys.modules["triton_python_backend_utils"] = BACKEND  # type: ignore[assignment]
    model = model_of(parameters)
    while (batch := channel.recv()) is not None:
        requests = [[Tensor("USER", users), Tensor("ITEM", items)] for users, items in batch]
        responses = model.execute(requests)
        channel.send(
            [
                (each.error.code, str(each.error))
                if each.error
                else {tensor.name: tensor.array for tensor in each.output_tensors}
                for each in responses
            ]
        )
    model.finalize()


class Instances:
    """Instances in processes of their own."""

    def __init__(self, count: int, parameters: dict[str, str]) -> None:
        self._channels, self._processes = list[Connection](), list[Any]()
        context = get_context("fork")
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=instance, args=(theirs, parameters))
            process.start()
            theirs.close()
            self._channels.append(ours)
            self._processes.append(process)

    def answers(self, batch: list[tuple[Ids, Ids]]) -> list[Any]:
        """The answers of each instance to the same batch, at the same time."""
        for each in self._channels:
            each.send(batch)
        return [each.recv() for each in self._channels]

    def __enter__(self) -> "Instances":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._channels:
            each.send(None)
            each.close()
        for process in self._processes:
            process.join(30)
            assert process.exitcode == 0


def rows_of(table: TableSpec, version: int) -> Any:
    """Whole numbers, whose sums are exact in any order."""
    return np.random.default_rng([version, table is USER]).integers(-99, 99, (ROWS, DIM)).astype(np.float32)


def release_of(version: int) -> Release:
    rows = [RowBatch(Shard.whole(table), np.arange(ROWS), rows_of(table, version)) for table in (USER, ITEM)]
    release = Release(Position("h", version, version), version, version, version == 1, [USER, ITEM], rows)
    return replace(release, version=version, model="clicks")


def test_all_instances_answer_from_the_memory_of_one_mirror(folder: Path) -> None:
    generator = np.random.default_rng(0)
    batch = [(generator.integers(0, ROWS, size), generator.integers(0, ROWS, size)) for size in (1, 5, 20)]
    with ExitStack() as stack:
        target = SharedTarget("clicks", "predictors", directory=folder)
        stack.callback(target.close)
        parameters = {"mirror": "clicks", "tables": "user item", "directory": str(folder)}
        instances = stack.enter_context(Instances(3, parameters))
        for answer in instances.answers(batch):
            assert answer == [("unavailable", "the mirror has no version yet")] * 3
        for version in (1, 2, 3):
            target.apply(release_of(version))
            users, items = rows_of(USER, version), rows_of(ITEM, version)
            for answer in instances.answers(batch):
                for (user, item), found in zip(batch, answer, strict=True):
                    assert found["VERSION"].tolist() == [version]
                    assert found["SCORE"].dtype == np.float32
                    assert found["SCORE"].tobytes() == (users[user] * items[item]).sum(1).tobytes()
        missing, uneven = (np.array([ROWS]), np.array([0])), (np.arange(2), np.arange(1))
        for answer in instances.answers([missing, uneven]):
            assert answer[0]["SCORE"].tolist() == [0.0]
            assert answer[1] == ("invalid", "USER has 2 ids and ITEM 1, expected the same number")


def test_instances_attach_to_a_recreated_mirror(folder: Path) -> None:
    batch = [(np.array([3]), np.array([4]))]
    target = SharedTarget("clicks", "predictors", directory=folder)
    target.apply(release_of(1))
    with Instances(2, {"mirror": "clicks", "tables": "user item", "directory": str(folder)}) as instances:
        assert [answer[0]["VERSION"] for answer in instances.answers(batch)] == [1, 1]
        target.close()
        shutil.rmtree(layout.folder_of("clicks", folder))
        for answer in instances.answers(batch):
            assert answer[0][0] == "unavailable"
            assert "no mirror 'clicks'" in answer[0][1]
        target = SharedTarget("clicks", "predictors", directory=folder)
        target.apply(replace(release_of(7), resync=True))
        assert [answer[0]["VERSION"] for answer in instances.answers(batch)] == [7, 7]
    target.close()


def test_a_torn_answer_is_retried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    target = SharedTarget("clicks", "predictors", directory=folder, longest_pin_seconds=0.01)
    target.apply(release_of(1))
    model = model_of({"mirror": "clicks", "tables": "user item", "directory": str(folder)})
    plain_answer, during = model._answer, [[2, 3], [], [4, 5], [6, 7]]

    def slow_answer(now: Any, request: Any) -> Any:
        """An answer during which releases come, which write over its rows."""
        for version in during.pop(0):
            target.apply(release_of(version))
        return plain_answer(now, request)

    model._answer = slow_answer
    request = [Tensor("USER", np.array([3])), Tensor("ITEM", np.array([4]))]
    (response,) = model.execute([request])
    assert [each.array for each in response.output_tensors if each.name == "VERSION"] == [3]
    (response,) = model.execute([request])
    assert response.error.code == "unavailable"
    assert "wrote over the rows" in str(response.error)
    assert during == []
    target.close()


def test_its_configuration_names_what_the_model_reads() -> None:
    config, model = (FOLDER / "config.pbtxt").read_text(), (FOLDER / "1/model.py").read_text()
    for name in re.findall(r'key: "(\w+)"', config) + re.findall(r'name: "([A-Z]+)"', config):
        assert f'"{name}"' in model
    assert len(re.findall(r'name: "[A-Z]+"', config)) == 4
    assert 'backend: "python"' in config
