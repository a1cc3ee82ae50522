"""Trainers whose clocks differ: who has come later publishes, and who was taken over stays out."""

from pathlib import Path

import pytest
from tests.support.local_service import join, opened, publish, send
from tests.support.wire import WHOLE, full_part, random_rows
from tests.unit.support.async_tests import in_loop

from deltasync.core.errors import Contradiction, ServiceUnavailable

HOUR = 3600 * 10**9


@in_loop()
async def test_a_trainer_that_comes_back_on_a_machine_an_hour_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait for that hour, and the run before cannot come back, also after a restart."""
    async with opened(tmp_path) as service:
        crashed = await publish(service, run="crashed", started=2 * HOUR)
        with pytest.raises(Contradiction, match="run behind began before run crashed"):
            await join(service, run="behind", started=HOUR)
        crashed.end("it has crashed")
        with pytest.raises(ServiceUnavailable, match="run behind may follow run crashed, which began"):
            await join(service, run="behind", started=HOUR)
        monkeypatch.setattr("deltasync.publish.runs.GONE_SECONDS", 0.0)
        behind = await join(service, run="behind", started=HOUR)
        await send(behind, full_part(1, random_rows(1), WHOLE))
        behind.end("it has gone")
        with pytest.raises(Contradiction, match="run crashed was there before run behind"):
            await join(service, run="crashed", started=2 * HOUR)
    async with opened(tmp_path) as service:
        with pytest.raises(Contradiction, match="run crashed was there before run behind"):
            await join(service, run="crashed", started=2 * HOUR)
        await join(service, run="later", started=2 * HOUR)


@in_loop()
async def test_after_a_restart_the_run_that_published_has_time_to_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await publish(service, run="here", started=2 * HOUR)
    async with opened(tmp_path) as service:
        with pytest.raises(ServiceUnavailable, match="by now 0"):
            await join(service, run="behind", started=HOUR)
        await join(service, run="here", started=2 * HOUR)
        with pytest.raises(Contradiction, match="run behind began before run here"):
            await join(service, run="behind", started=HOUR)
