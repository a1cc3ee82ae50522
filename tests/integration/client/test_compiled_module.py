"""A dense part that was compiled follows as any module does, and is of one version at any time."""

import copy
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import compiled
from tests.support.compiled import (
    KEEP,
    Model,
    Over,
    as_written,
    compile_over,
    compiled_model,
    release_of,
    state_of,
    table_of,
    tables_of,
    weights,
)
from tests.support.fleet import AT_ONCE, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.programs import run_program
from tests.support.server import RunningService
from tests.support.targets import read_rows
from torch import nn

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.client import RowBatch, TableKind, TableSpec
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_compiled import CompiledModule
from deltasync.client.targets.torch_target import TorchTarget

IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [5, 5]])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_over(tmp_path_factory.mktemp("packages") / "over.pt2", **KEEP)


@pytest.fixture
def model(package: Path) -> Model:
    return compiled_model(package)


def followed(model: nn.Module, reads: Reads = "pause") -> TorchTarget:
    target = TorchTarget(model, reads=reads)
    target.apply(release_of(1, weights(1), resync=True))
    return target


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS)
        return found


def held(target: TorchTarget, model: Model) -> dict[str, bytes]:
    rows = ((each.name, target.read(each, np.arange(each.rows))) for each in tables_of(model))
    return {name: values.tobytes() for name, values in rows if values is not None}


def rows_of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {table_of(name, each).name: each.numpy().tobytes() for name, each in state.items()}


@pytest.mark.nightly
def test_releases_that_bring_a_part_leave_the_rest_as_it_was(model: Model) -> None:
    """After a swap the other constants are those of the release before: they must not come back."""
    expected = weights(1)
    target = followed(model)
    for version, name in enumerate([*expected, *expected], 2):
        expected[name] = weights(version)[name]
        target.apply(release_of(version, {name: expected[name]}))
        assert held(target, model) == rows_of(expected)
    written = Model(Over())
    written.load_state_dict(expected, strict=False)
    assert torch.equal(output(model), output(written))


@pytest.mark.nightly
def test_some_rows_of_a_constant(model: Model) -> None:
    target, name = followed(model), "over.layers.0.weight"
    release = release_of(2, {})
    table = table_of(name, weights(1)[name])
    release.rows.append(RowBatch.of_table(table, np.array([1, 5]), np.full((2, table.dim), 9, np.float32)))
    target.apply(release)
    expected = weights(1)[name]
    expected[[1, 5]] = 9
    assert torch.equal(model.state_dict()[name], expected)


class Serving:
    """Threads that run forwards, and note the version that each was told and what came out."""

    def __init__(self, target: TorchTarget, threads: int) -> None:
        self.outputs: list[tuple[int, torch.Tensor]] = []
        self._target, self._stop = target, threading.Event()
        self._threads = [threading.Thread(target=self._serve) for _ in range(threads)]

    def __enter__(self) -> "Serving":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def wait_for(self, version: int) -> None:
        """Until a forward of a version has run."""
        while not self.outputs or self.outputs[-1][0] != version:
            assert any(each.is_alive() for each in self._threads)
            self._stop.wait(0.001)

    def _serve(self) -> None:
        while not self._stop.is_set():
            with self._target.reading() as reading:
                found = output(reading.module)
            self.outputs.append((reading.version, found))


@pytest.mark.nightly
@pytest.mark.parametrize("reads", ["pause", "copies"])
def test_each_output_is_of_the_version_that_its_reader_saw(model: Model, reads: Reads) -> None:
    target, versions = followed(model, reads), range(2, 40)
    with Serving(target, 3) as serving:
        for version in versions:
            target.apply(release_of(version, weights(version)))
            serving.wait_for(version)
    expected = {version: output(as_written(version)) for version in (1, *versions)}
    assert {version for version, _ in serving.outputs} >= set(versions)
    assert all(torch.equal(found, expected[version]) for version, found in serving.outputs)


@pytest.mark.nightly
def test_a_release_that_fails_in_a_later_table_changes_nothing(model: Model) -> None:
    target, written = TorchTarget(model), as_written(1)
    assert not target.takes_parts
    tables = sorted(tables_of(written), key=lambda table: table.name == "user")
    target.apply(release_of(1, weights(1), resync=True, tables=tables))
    model.user.to(torch.float16)  # After its place was found. It is staged last.
    with pytest.raises(Contradiction, match=r"type torch\.float16"):
        target.apply(release_of(2, weights(2), tables=tables))
    model.user.to(torch.float32)
    model.user.load_state_dict({"weight": weights(1)["user.weight"]})
    assert held(target, model) == rows_of(weights(1))
    assert torch.equal(output(model), output(written))
    # Nor does anything of it come along with the next one.
    target.apply(release_of(3, {"over.scale": weights(3)["over.scale"]}, tables=tables))
    assert held(target, model) == rows_of(weights(1) | {"over.scale": weights(3)["over.scale"]})


@pytest.mark.nightly
@pytest.mark.parametrize("releases", [0, 1, 2])
def test_damage_to_a_constant_shows_until_it_is_repaired(model: Model, releases: int) -> None:
    """Whichever of the two memories is served when rows are read again."""
    target, name = followed(model), "over.layers.0.weight"
    with torch.inference_mode():
        model.over.get_buffer("layers.0.weight")[3, 2] += 1
    damaged = output(model)
    for version in range(2, 2 + releases):
        target.apply(release_of(version, {"over.scale": weights(1)["over.scale"]}))
    assert torch.equal(output(model), damaged)
    assert {each for each, rows in held(target, model).items() if rows != rows_of(weights(1))[each]} == {name}
    target.apply(release_of(5, {name: weights(1)[name]}))
    assert torch.equal(output(model), output(as_written(1)))
    assert held(target, model) == rows_of(weights(1))


@pytest.mark.nightly
def test_a_loaded_state_stays(model: Model) -> None:
    target = followed(model)
    model.load_state_dict(weights(2))
    assert torch.equal(output(model), output(as_written(2)))
    target.apply(release_of(3, {"over.scale": weights(2)["over.scale"]}))
    assert torch.equal(output(model), output(as_written(2)))


@pytest.mark.nightly
def test_an_attribute_assigned_over_a_constant_is_not_served(model: Model) -> None:
    """Forwards do not see it: what is read back must not be taken from there."""
    target = followed(model)
    model.load_state_dict(weights(2), assign=True)
    served = weights(1) | {"user.weight": weights(2)["user.weight"]}
    assert held(target, model) == rows_of(served)
    target.apply(release_of(3, {"over.scale": weights(3)["over.scale"]}))
    assert held(target, model) == rows_of(served | {"over.scale": weights(3)["over.scale"]})
    assert rows_of(state_of(model)) == held(target, model)


@pytest.mark.nightly
def test_a_copy_has_the_hooks_of_the_module(model: Model) -> None:
    model.over.register_forward_hook(lambda _module, _inputs, found: 2 * found)
    target = followed(model, "copies")
    for version in (2, 3):  # One copy, then the other one.
        target.apply(release_of(version, weights(version)))
        with target.reading() as reading:
            assert torch.equal(output(reading.module), 2 * output(as_written(version)))


FORKED = """
import os, sys
from deltasync.client.targets.torch_compiled import CompiledModule

module = CompiledModule(sys.argv[1])
if os.fork() == 0:
    sys.exit()
assert os.wait()[1] == 0
assert os.path.exists(module._library.path)
"""


@pytest.mark.nightly
def test_a_forked_process_leaves_the_library_to_its_parent(package: Path) -> None:
    ended = run_program(sys.executable, "-W", "ignore", "-c", FORKED, str(package))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.nightly
def test_a_copy_has_constants_of_its_own(model: Model) -> None:
    target = followed(model)
    target.apply(release_of(2, weights(2)))
    copied = copy.deepcopy(model)
    assert torch.equal(output(copied), output(as_written(2)))
    other = TorchTarget(copied)
    other.apply(release_of(3, weights(3), resync=True))
    assert torch.equal(output(copied), output(as_written(3)))
    assert torch.equal(output(model), output(as_written(2)))
    assert not copied.training


@pytest.mark.nightly
def test_a_package_without_the_named_model_is_refused(package: Path) -> None:
    with pytest.raises(NotFound, match=r"model 'other' of .* has 0 libraries"):
        CompiledModule(package, name="other")


@pytest.mark.nightly
def test_constants_outlive_the_module(package: Path) -> None:
    kept = followed(compiled_model(package)).tables()["over.layers.0.weight"]
    assert torch.equal(kept, weights(1)["over.layers.0.weight"])


def with_table(table: TableSpec) -> Any:
    tables = [table if each.name == table.name else each for each in tables_of(as_written(1))]
    return release_of(1, {}, resync=True, tables=[*tables, *([] if table in tables else [table])])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("table", "has"),
    [
        (TableSpec("over.unused", 1, 3), "or the compiled code does not read it, like num_batches_tracked"),
        (TableSpec("over.layers.2.bias", 1, 2), "the module has over.layers.2.bias of shape [1]"),
        (
            TableSpec("over.layers.0.bias", 1, 8, np.dtype("<i4"), TableKind.PARAMETER),
            "of shape [8] and type torch.float32",
        ),
    ],
    ids=["folded away", "shape", "type"],
)
def test_what_the_constants_do_not_fit_is_refused_by_name(model: Model, table: TableSpec, has: str) -> None:
    before = output(model)
    with pytest.raises(DeltasyncError) as refused:
        TorchTarget(model).apply(with_table(table))
    assert f"table {table.name!r}" in str(refused.value)
    assert has in str(refused.value)
    assert torch.equal(output(model), before)


@pytest.mark.nightly
def test_small_constants_compiled_into_the_code_are_refused_by_name(tmp_path: Path) -> None:
    """As AOTInductor does it unless told otherwise: the model would go on with the bias of its export."""
    model = compiled_model(compile_over(tmp_path / "over.pt2"))
    with pytest.raises(
        NotFound, match=r"compiled module over has no constant layers\.2\.bias.*always_keep_tensor_const"
    ):
        TorchTarget(model).apply(release_of(1, weights(1), resync=True))


@pytest.mark.nightly  # Each is compiled.
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aot_inductor.use_runtime_constant_folding": True}, "_FOLDED_CONST_.* are derived from other constants"),
        ({"freezing": True}, "_frozen_param.* are derived from other constants"),
        ({"aot_inductor.package_constants_in_so": False, **KEEP}, "it has no constants"),
    ],
    ids=["folded", "frozen", "without constants"],
)
def test_packages_that_cannot_follow_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        CompiledModule(compile_over(tmp_path / "over.pt2", **options))


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_text("no archive")
    with pytest.raises(NotFound, match="there is no such file"):
        CompiledModule(tmp_path / "none.pt2")
    with pytest.raises(InvalidInput, match="not a package"):
        CompiledModule(tmp_path / "text.pt2")


@pytest.mark.nightly
def test_a_conversion_is_refused_where_it_would_change_anything(model: Model) -> None:
    model.to("cpu").float()
    with pytest.raises(Contradiction, match=r"was compiled as torch\.float32 on the CPU"):
        model.half()


@pytest.mark.nightly  # It is compiled.
def test_a_part_compiled_in_half_precision_holds_rounded_rows(tmp_path: Path) -> None:
    model = compiled_model(compile_over(tmp_path / "over.pt2", torch.float16, **KEEP))
    model.user.half()
    target, dense = TorchTarget(model), {name: each for name, each in weights(2).items() if "over" in name}
    tables = [TableSpec("user", compiled.ROWS, compiled.DIM, np.dtype("<f2")), *tables_of(as_written(1))[1:]]
    for version in (1, 2):
        target.apply(release_of(version, dense, resync=version == 1, tables=tables))
        for table in tables[1:]:
            assert torch.equal(model.state_dict()[table.name], dense[table.name].half())
            rows = read_rows(target, table, np.arange(table.rows))
            assert rows.tobytes() == dense[table.name].numpy().tobytes()
        dense = {name: each * 1.37 for name, each in dense.items()}


def scripted(how: str) -> Any:
    jit: Any = torch.jit
    if how == "trace":
        return jit.trace(Over().eval(), torch.ones(3, compiled.DIM))
    script = jit.script(Over().eval())
    return jit.freeze(script) if how == "freeze" else script


SCRIPTED = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@SCRIPTED
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_modules_follow(how: str) -> None:
    model = Model(scripted(how)).eval()
    target = followed(model)
    for version in (2, 3, 4):
        target.apply(release_of(version, weights(version)))
        assert torch.equal(output(model), output(as_written(version)))


@SCRIPTED
def test_frozen_torchscript_is_refused_by_name() -> None:
    with pytest.raises(NotFound, match=r"table.* 'over\.scale'.*the TorchScript module over has no parameters"):
        followed(Model(scripted("freeze")).eval())


def expected(trainer: Trainer) -> torch.Tensor:
    """What the model that the trainer holds puts out, as it was written."""
    model = Model(Over()).eval()
    state = {name.replace("user", "user.weight"): torch.from_numpy(rows) for name, rows in trainer.rows.items()}
    shapes = model.state_dict()
    model.load_state_dict({name: each.reshape(shapes[name].shape) for name, each in state.items()}, strict=False)
    with torch.no_grad():
        found: torch.Tensor = model(IDS)
    return found


@pytest.mark.nightly
def test_a_damaged_compiled_replica_is_repaired(tmp_path: Path, package: Path) -> None:
    target = TorchTarget(compiled_model(package))

    def output() -> torch.Tensor:
        with target.reading() as reading, torch.no_grad():
            found: torch.Tensor = reading.module(IDS)
            return found

    with (
        RunningService(tmp_path / "data", progress_seconds=0.02, releases=AT_ONCE) as service,
        Trainer(service.grpc, tables_of(as_written(1))) as trainer,
        follow(service, "predictors", "a", target),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        assert torch.equal(output(), expected(trainer))
        for _ in range(5):
            wait_until_in_sync(service, "predictors", trainer.change(2))
            assert torch.equal(output(), expected(trainer))
        with target.reading() as reading, torch.inference_mode():
            reading.module.get_buffer("over.layers.0.weight")[3, 2] += 1
        assert not torch.equal(output(), expected(trainer))

        def repaired(lag: dict[str, Any]) -> bool:
            return lag["state"] == "in sync" and torch.equal(output(), expected(trainer))

        wait_for_lag(service, "predictors", repaired)
