"""A recovered model that lacks rows, until its trainer sends them or an operator gives it up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from tests.support.local_service import join, opened, publish, send
from tests.support.wire import WHOLE, full_part, part, random_rows

from deltasync.base.events import EventKind
from deltasync.cuts.session import PublishSession
from deltasync.service.service import Service

MODEL = "clicks"


async def cut(session: PublishSession, step: int) -> None:
    await send(session, part(step, [(0, [step], np.full((1, 4), step, np.float32))]))
    await session.coordinator.settled()


@asynccontextmanager
async def lacking(folder: Path) -> AsyncIterator[Service]:
    """A service whose model lacks the rows of a damaged file that all its checkpoints share."""
    async with opened(folder) as service:
        session = await publish(service)
        base = await service.checkpoints.make(MODEL)
        await cut(session, 2)
        await service.checkpoints.make(MODEL)
    damaged = folder / "checkpoints" / base.files[0].name
    content = bytearray(damaged.read_bytes())
    content[200] ^= 16
    damaged.write_bytes(content)
    async with opened(folder) as service:
        assert MODEL in service.models.stuck
        yield service


def test_a_model_is_given_up_while_its_trainer_sends_the_rows(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), lacking(tmp_path) as service:
            sealed = asyncio.Event()
            service.events.listen(lambda event: sealed.set() if event.kind is EventKind.CUT_SEALED else None)
            session = await join(service, run="later", started=2, shards=WHOLE)
            async with service.models.changing:
                given_up = asyncio.create_task(service.removals.give_up_model(MODEL, "an operator"))
                await asyncio.sleep(0)  # It waits for the lock, and so will the cut.
                sent = asyncio.create_task(send(session, full_part(3, random_rows(3), WHOLE)))
                await sealed.wait()
            await given_up
            await asyncio.wait([sent])
            assert MODEL not in service.models
            await publish(service, run="last", started=3)
            assert service.models[MODEL].position.number == 1

    asyncio.run(main())
