"""A snapshot that cannot be made, because the model moves or for any other reason, ends nothing else."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.local_service import publish
from tests.unit.service.test_snapshots import MODEL, Process, cut, run

from deltasync.core.errors import ServiceUnavailable
from deltasync.service.snapshots import SnapshotLoop, SnapshotOptions
from deltasync.snapshots.place import SnapshotPlace


def test_a_model_that_is_stopped_refuses_what_needs_its_thread(tmp_path: Path) -> None:
    """A snapshot may wait for the log while its model is given to another process."""

    async def scenario(a: Process, _: Process) -> None:
        await a.take()
        await cut(await publish(a.service), 2, 1)
        model = a.service.models[MODEL]
        await a.give_up()
        with pytest.raises(ServiceUnavailable, match="model 'clicks' is stopped in this process"):
            await model.on_thread(lambda: None)

    run(tmp_path, scenario)


def test_no_failure_of_a_snapshot_ends_the_service(tmp_path: Path) -> None:
    class Broken(SnapshotPlace):
        def names(self, folder: str) -> Sequence[object]:  # type: ignore[override]
            raise RuntimeError("a defect of a storage library")

    async def scenario(a: Process, _: Process) -> None:
        await a.take()
        await cut(await publish(a.service), 2, 1)
        url = str(tmp_path / "broken")
        snapshots = SnapshotLoop(a.service, SnapshotOptions(url=url, seconds=0), Broken(url))
        running = asyncio.create_task(snapshots.run())
        while not snapshots.failures:
            await asyncio.sleep(0.01)
        assert await asyncio.wait({running}, timeout=0.1) == (set(), {running})
        assert snapshots.troubles == ["snapshots of model 'clicks': a defect of a storage library"]
        running.cancel()

    run(tmp_path, scenario)
