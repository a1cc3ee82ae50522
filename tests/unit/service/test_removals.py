"""What may be removed while cuts are in trouble, and who waits for that."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.local_service import join, publish, run, send
from tests.support.wire import ITEM, USER, WHOLE, full_part, part, random_rows

from deltasync.core.errors import Contradiction, ServiceUnavailable
from deltasync.feeds.model import Model
from deltasync.service import removals
from deltasync.service.removals import Removals
from deltasync.service.service import Service

ROWS = random_rows(0)


def test_a_table_of_a_model_whose_last_cut_was_too_large_is_deleted(tmp_path: Path) -> None:
    async def scenario(service: Service) -> None:
        (await publish(service)).end("it has gone")
        coordinator = service.coordinators["clicks"]
        coordinator.sealer.say_failed("a cut is too large for the log", Contradiction("too large"))
        await Removals(service).delete_table("clicks", ITEM.name, "a test")
        assert [table.spec.name for table in service.models["clicks"].tables] == [USER.name]

    run(tmp_path, scenario)


def test_nobody_waits_for_a_deletion_that_waits_for_a_cut_that_cannot_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "_LONGEST_SECONDS", 0.01)

    async def fails(*_: Any) -> None:
        raise MemoryError("no room")

    async def scenario(service: Service) -> None:
        session = await join(service)
        await send(session, full_part(1, ROWS, WHOLE))
        await service.coordinators["clicks"].settled()
        monkeypatch.setattr(Model, "apply_cut", fails)
        await send(session, part(2, [(0, [7], np.full((1, 4), 2, "<f4"))]))
        session.end("it has gone")
        with pytest.raises(ServiceUnavailable, match="cannot be applied now: version 2 could not be applied"):
            await Removals(service).delete_table("clicks", ITEM.name, "a test")
        assert await service.open_model("clicks") is service.coordinators["clicks"]

    run(tmp_path, scenario)
