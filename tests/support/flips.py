"""Flips bits in a data directory, and checks what a service started on it delivers."""

import asyncio
import json
import os
import shutil
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.local_service import join, opened, send
from tests.support.releases import deleted_rows, live_rows
from tests.support.wire import WHOLE, close, delete_chunk, full_part, part, random_rows

from deltasync.base.errors import StorageFailed
from deltasync.base.events import Event
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.value_types import ValueType
from deltasync.model.feed import Feed
from deltasync.service.service import Service
from deltasync.views.view import View

VERSIONS = 5


def write(folder: Path, checkpoints: Sequence[int] = (), versions: int = VERSIONS) -> None:
    """Write a model of two tables with deleted rows, a view, consumers, and checkpoints of some versions."""
    asyncio.run(write_in_loop(folder, checkpoints, versions))


async def write_in_loop(folder: Path, checkpoints: Sequence[int] = (), versions: int = VERSIONS) -> None:
    """Like `write`, in the running event loop."""
    async with opened(folder.with_suffix(".open")) as service:
        await service.consumers.create("plain", "clicks", Policy())
        await service.consumers.create("small", "clicks", Policy(value_type=ValueType.INT8))
        session = await join(service)
        await send(session, full_part(1, random_rows(0), WHOLE))
        await service.models.coordinators["clicks"].settled()
        rng = np.random.default_rng(0)
        for step in range(2, versions + 1):
            requests = part(step, [(0, [step, 9, 20 + step], rng.random((3, 4), np.float32))])
            if step == 3:
                requests = [delete_chunk(step, 0, [3, 11]), close(step, 2)]
            await send(session, requests)
            await service.models.coordinators["clicks"].settled()
            _acknowledge(service, step)
            view = service.views.get(service.registry.get("small"))
            assert view
            if step >= VERSIONS - 2:
                await _release(view)
            if step in checkpoints:
                await service.checkpoints.make("clicks")
        shutil.copytree(folder.with_suffix(".open"), folder)


async def _release(view: View) -> None:
    policy = Policy(value_type=ValueType.INT8)
    await view.prepare(policy)
    await view.make_release(policy, 0)


def _acknowledge(service: Service, version: int) -> None:
    history, consumer = service.models["clicks"].history, service.registry.get("plain")
    replica = service.registry.connect(consumer, f"replica-{version}", asyncio.Event())
    service.registry.acknowledge(consumer, replica, Position(history, version))


def outcome(folder: Path) -> dict[str, Any]:
    """What a service started on a data directory delivers. Uses a separate process, which a signal may end."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            signal.alarm(20)
            with os.fdopen(writing, "w") as pipe:
                json.dump(started(folder), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": signal.Signals(os.WTERMSIG(status)).name}
    found: dict[str, Any] = json.loads(text)
    return found


def started(folder: Path) -> dict[str, Any]:
    """Like `outcome`, in this process."""
    try:
        return asyncio.run(_given(folder))
    except BaseException as error:  # noqa: BLE001  # told to the test
        leaf = error
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        if isinstance(leaf, StorageFailed):
            return {"refused": str(leaf)}
        return {"unforeseen": "".join(traceback.format_exception(leaf))[-3000:]}


async def _given(folder: Path) -> dict[str, Any]:
    said = list[str]()
    async with opened(folder, listener=lambda event: said.append(_line(event))) as service:
        consumers = {
            name: [
                each.model,
                each.policy.description,
                *(f"{name} {line.applied}" for name, line in each.replicas.items()),
            ]
            for name, each in service.registry.consumers.items()
        }
        found: dict[str, Any] = {"consumers": consumers, "said": said, "position": None, "view": None, "given": {}}
        if model := service.models.get("clicks"):
            found["position"] = [model.position.number, model.history]
            found["given"] = {f"model {after}": await _of(model, after) for after in range(VERSIONS)}
            if view := service.views.get(service.registry.get("small")):
                found["given"]["view 0"] = await _of(view, 0)
                found["view"] = [view.position.number, view.history]
        return found


async def _of(feed: Feed, after: int) -> Any:
    release = await feed.release(after)
    live = {
        f"{slot}": {f"{row}": values.tobytes().hex() for row, values in zip(each.ids, each.values, strict=True)}
        for slot, each in live_rows(release).items()
    }
    for slot, each in deleted_rows(release).items():
        live.setdefault(f"{slot}", {}).update({f"{row}": None for row in each.ids})
    return live


def _line(event: Event) -> str:
    return f"{event.kind.label} {event.text} {event.error or ''}"
