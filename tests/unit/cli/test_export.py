"""Versions read from checkpoints without a service: all rows into a file, and some rows on the terminal."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from tests.support.command import deltasync
from tests.support.local_service import opened, publish, send
from tests.support.wire import close, delete_chunk, part, random_rows

from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.core.export_metadata import ExportMetadata
from deltasync.core.policy import Policy
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

USER = TableSpec("sparse.user", 40, 4)
TABLES = [
    USER,
    TableSpec("sparse.item", 30, 6, np.dtype("<f2")),
    TableSpec("top.weight", 3, 8, kind=TableKind.PARAMETER, sizes=(0, 2, 4)),
    TableSpec("top.bias", 1, 3, kind=TableKind.PARAMETER, sizes=(0,)),
    TableSpec("count", 1, 1, np.dtype("<i8"), TableKind.BUFFER, sizes=()),
    TableSpec("large", 1, 5, np.dtype("?"), TableKind.BUFFER),
    TableSpec("map.raw_ids", 40, 1, np.dtype("<i8"), TableKind.ID_MAP, of="sparse.user"),
]
ROWS = random_rows(1, TABLES)


class Versions:
    """Checkpoints of a service that has ended: kept version 1 ("good"), checkpoint 2, kept version 3, and 4.

    Attributes:
        at: their folder.
        good: the version that has the name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, str(folder / "checkpoints")
        asyncio.run(self._write())

    async def _write(self) -> None:
        async with opened(self.folder, keep_checkpoints=9) as service:
            session = await publish(service, tables=TABLES)
            await service.consumers.create("mobile", "clicks", Policy(value_type=ValueType.INT8))  # It has a view.
            self.good: KeptVersion = await service.versions.keep("clicks", "good")
            await send(session, part(2, [(0, [3, 5], np.full((2, 4), 0.1, np.float32))]))
            await session.coordinator.settled()
            await service.checkpoints.make("clicks")
            await send(session, [delete_chunk(3, 0, [5, 7]), close(3, 2)])
            await session.coordinator.settled()
            await service.versions.keep("clicks")
            await send(session, part(4, [(4, [0], np.array([[12]]))]))
            await session.coordinator.settled()
            await service.checkpoints.make("clicks")

    def manifests(self) -> list[Path]:
        return sorted(Path(self.at, "clicks", "manifests").iterdir())

    def run(self, *arguments: Any) -> tuple[int, str, str]:
        return deltasync(*map(str, arguments), "--at", self.at)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "data")


def rows_at(version: int) -> list[Any]:
    user, *others = [rows.copy() for rows in ROWS]
    if version >= 2:
        user[[3, 5]] = 0.1
    if version >= 3:
        user[[5, 7]] = 0
    if version >= 4:
        others[3][:] = 12
    return [user, *others]


@pytest.mark.parametrize(
    ("reference", "version"),
    [(["--version", name], int(name)) for name in "1234"] + [(["--version", "good"], 1), ([], 4)],
)
def test_a_version_is_exported_bit_by_bit(
    versions: Versions, tmp_path: Path, reference: list[str], version: int
) -> None:
    file = tmp_path / "version.safetensors"
    file.write_text("of yesterday")
    code, out, err = versions.run("export", "clicks", file, *reference)
    assert (code, err) == (0, "")
    assert out.startswith(f"version {version} of model clicks is in {file}: 7 tables, ")
    assert out.endswith(f", after step {version}\n")
    tensors = load_file(file)
    shapes = [(40, 4), (30, 6), (3, 2, 4), (3,), (), (1, 5), (40, 1)]
    assert {name: each.shape for name, each in tensors.items()} == {
        table.name: shape for table, shape in zip(TABLES, shapes, strict=True)
    }
    for table, rows in zip(TABLES, rows_at(version), strict=True):
        found = tensors[table.name].reshape(rows.shape)
        np.testing.assert_array_equal(found, rows, err_msg=table.name, strict=True)
    with safe_open(file, "numpy") as opened_file:
        described = ExportMetadata.of_metadata(str(file), opened_file.metadata())
    assert (described.model, described.step, described.tables) == ("clicks", version, TABLES)
    assert described.position.number == version
    if version == 1:
        assert described.position.seal == versions.good.seal.checksum
        assert described.position.history
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [file.name]
    assert file.stat().st_mode & 0o600 == 0o600
    assert file.stat().st_mode & 0o777 == _mode_of_a_new_file(tmp_path)


def _mode_of_a_new_file(folder: Path) -> int:
    new = folder / "new"
    new.touch()
    return new.stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("model", "reference", "message"),
    [
        (
            "clicks",
            "bad",
            "has no version 'bad' of model 'clicks'; kept versions: 3, good; versions with a checkpoint, newest "
            "first: 4, 3, 2, 1",
        ),
        ("clicks", "9", "has no version '9' of model 'clicks'; kept versions: 3, good"),
        ("click", "good", "has no checkpoint of model 'click'; models there: clicks"),
    ],
)
def test_what_is_not_there_is_an_error_with_what_is(
    versions: Versions, tmp_path: Path, model: str, reference: str, message: str
) -> None:
    for command in (["export", model, tmp_path / "file"], ["show", model, "sparse.user", 3]):
        code, out, err = versions.run(*command, "--version", reference)
        assert (code, out) == (1, "")
        assert message in err
    assert not (tmp_path / "file").exists()


def test_a_damaged_file_is_named_and_an_earlier_export_stays(versions: Versions, tmp_path: Path) -> None:
    file = tmp_path / "version.safetensors"
    file.write_text("of yesterday")
    damaged = max(Path(versions.at, "clicks", "data").iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for command in (["export", "clicks", file], ["show", "clicks", "sparse.user", 3]):
        code, out, err = versions.run(*command)
        assert (code, out) == (1, "")
        assert f"{damaged.name} is damaged" in err
    assert file.read_text() == "of yesterday"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [file.name]


def test_a_damaged_newest_checkpoint_is_passed_over_aloud(
    versions: Versions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *earlier, newest = versions.manifests()
    newest.write_bytes(newest.read_bytes()[:-1])
    code, out, _ = versions.run("export", "clicks", tmp_path / "file")
    assert (code, out[:9]) == (0, "version 3")
    assert newest.name in caplog.text
    for each in earlier:
        each.write_bytes(each.read_bytes()[:-1])
    code, _, err = versions.run("export", "clicks", tmp_path / "none")
    assert code == 1
    assert newest.name in err
    assert "no checkpoint can be read" in err


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_file_that_cannot_be_written_is_an_error(versions: Versions, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / folder / "version.safetensors"
    code, _, err = versions.run("export", "clicks", path)
    assert code == 1
    assert f"{path} cannot be written: " in err


def test_rows_of_a_version_are_shown(versions: Versions) -> None:
    def shown(version: int) -> list[Any]:
        code, out, err = versions.run("show", "clicks", "sparse.user", 7, 3, 5, 3, "--version", version, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        for each in found:
            if each["state"] == "live":
                expected = rows_at(version)[0][each["row"]]
                np.testing.assert_array_equal(np.array(each["values"], np.float32), expected)
        return [(each["row"], each["changed"], each["state"], len(each["values"])) for each in found]

    assert shown(1) == [(row, 1, "live", 4) for row in (7, 3, 5)]
    assert shown(2) == [(7, 1, "live", 4), (3, 2, "live", 4), (5, 2, "live", 4)]
    assert shown(3) == [(7, 3, "deleted", 0), (3, 2, "live", 4), (5, 3, "deleted", 0)]
    code, out, _ = versions.run("show", "clicks", "sparse.user", 5, 3)
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["row", "changed", "state", "values"],
        ["5", "3", "deleted"],
        ["3", "2", "live", "0.1", "0.1", "0.1", "0.1"],
    ]


def test_rows_of_other_kinds_are_shown(versions: Versions) -> None:
    def values(table: str, row: int = 0) -> Any:
        return json.loads(versions.run("show", "clicks", table, row, "--json")[1])[0]["values"]

    assert values("count") == [12]
    assert values("large") == ROWS[5][0].tolist()
    assert values("sparse.item", 2) == [float(str(each)) for each in ROWS[1][2]]
    assert values("map.raw_ids", 4) == ROWS[6][4].tolist()


def test_rows_and_tables_that_are_not_there(versions: Versions) -> None:
    code, _, err = versions.run("show", "clicks", "sparse.user", 3, 40)
    assert (code, err) == (1, "Error: table 'sparse.user' has rows 0 to 39: no row 40\n")
    code, _, err = versions.run("show", "clicks", "user", 3, "--version", "good")
    assert code == 1
    assert "version 1 of model 'clicks' has no table 'user'; tables: count, large, map.raw_ids, sparse.item" in err


def test_a_table_with_the_name_of_the_metadata_is_refused(tmp_path: Path) -> None:
    async def write() -> None:
        async with opened(tmp_path / "data") as service:
            await publish(service, tables=[TableSpec("__metadata__", 10, 4)])
            await service.checkpoints.make("clicks")

    asyncio.run(write())
    file = tmp_path / "clicks.safetensors"
    code, out, error = deltasync("export", "clicks", str(file), "--at", str(tmp_path / "data" / "checkpoints"))
    assert (code, out) == (1, "")
    assert "table '__metadata__': safetensors files have their metadata under this name" in error
    assert not file.exists()
