"""A start on a data directory of an earlier version may end at any point: the next one goes on."""

from pathlib import Path

import pytest
from tests.support.crashes import Crashes
from tests.support.data_directory import unpack
from tests.support.local_service import run

from deltasync.core.events import EventKind
from deltasync.service.inspection import inspect
from deltasync.service.service import Service


async def _start(_: Service) -> None:
    pass


@pytest.mark.parametrize("version", ["5ad1623", "b856f98"])
def test_rows_are_what_they_were_and_nothing_is_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    content = unpack(version, tmp_path / "data")
    with monkeypatch.context() as patch:
        crashes = Crashes(patch, tmp_path / "data", tmp_path)
        run(tmp_path / "data", _start)

    async def scenario(service: Service) -> None:
        for table in service.models["clicks"].tables:
            rows = content.model[table.spec.name]
            assert table.rows.tobytes() == rows.tobytes()
        found = await inspect(service, "test")
        assert {each.consumer for each in found} == {"", "ranked", "counted"}
        assert not [each for each in found if each.damaged or each.restamped]
        assert not service.event_counts[EventKind.FAILED]

    assert len(crashes.copies) > 10
    for copy in crashes.copies:
        run(copy, scenario)
