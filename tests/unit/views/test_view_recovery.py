"""Views that come back after a crash: from a checkpoint, or from nothing, and the log after it."""

import asyncio

import pytest
from tests.support.damage import change_value
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import (
    ITEM,
    TOP,
    USER,
    bits_of,
    changed,
    held_by_a_replica,
    same_as_the_model,
)
from tests.unit.views.models import Models

from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.log.records import key_of, pack_json, unpack_json
from deltasync.views.decision import ReleaseOptions
from deltasync.views.log import ViewLog, view_name
from deltasync.views.view import View

INT8 = Policy(top_k=1, value_type=ValueType.INT8)
HEADS, IDS = "heads/top", "releases/top"


async def released_twice(local: LocalModel) -> View:
    """A view of three releases, the last of which has left rows."""
    view = await local.prepared_view(TOP)
    for seed in (1, 2):
        await local.cut(changed(seed, USER, 3, 4, 5))
        await view.make_release(TOP, 0)
    return view


@pytest.mark.parametrize("damaged", [False, True])
async def test_dirty_rows_of_a_checkpoint_come_back(local: LocalModel, models: Models, damaged: bool) -> None:
    """Where the newest checkpoint has them in a damaged file, the one before it and the log have them, too."""
    view = await released_twice(local)
    await local.checkpoint()
    await local.cut(changed(3, USER, 6, 7) | changed(3, ITEM, 2))
    await view.make_release(TOP, 0)
    made = await local.checkpoint()
    (file,) = made.dirty
    if damaged:
        path = models.folder / "checkpoints" / file.name
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
    bits = await bits_of(view)
    assert view.state.backlog_rows > 1
    local = await models.open()
    assert await bits_of(local.view()) == bits
    assert [file.name in problem for problem in local.model.problems] == [True] * damaged


async def test_ids_of_an_unfinished_release_do_not_join_the_next(local: LocalModel, models: Models) -> None:
    """A crash came before its head was there. Else replicas that have that number would never get these rows."""
    view = await local.prepared_view(TOP)
    number = view.position.number + 1
    other = ViewLog(local.log, "top")
    await local.cut(changed(1, USER, *range(9)) | changed(1, ITEM, 4))
    ids = [await local.model.on_thread(table.source.changed_since, 1) for table in view.state.tables]
    other.write({"number": number}, ids, None)
    local.log.drop(HEADS, number).result()
    assert [record.part for record in local.log.read(IDS)] == [0, 1]
    await view.make_release(TOP, 0)
    bits = await bits_of(view)
    assert await bits_of((await models.open()).view()) == bits


@pytest.mark.parametrize("what", ["a head", "ids", "the newest head", "the first head"])
async def test_a_view_with_lost_log_records_begins_anew(local: LocalModel, models: Models, what: str) -> None:
    """Only the newest release can be missing without a trace: it never was."""
    view = await released_twice(local)
    history, newest = view.history, view.position.number
    if what == "ids":
        assert [record.number for record in local.log.read(IDS)] == [newest - 1, newest]
        local.log.truncate(IDS, newest - 1).result()
    elif what == "the newest head":
        local.log.drop(HEADS, newest).result()
    else:
        (head,) = local.log.read(HEADS, newest - 1, newest - 1)
        local.log.truncate(HEADS, newest - 1 if what == "a head" else newest - 2).result()
        assert head.payload
    local = await models.open()
    if what == "the newest head":
        assert local.view().position.number == newest - 1
        return
    said = "the log lacks rows of release" if what == "ids" else "the log lacks releases before release"
    assert said in local.lost["top"]
    view = await local.prepared_view(TOP)
    assert view.history != history
    assert same_as_the_model(await held_by_a_replica(view), local)


@pytest.mark.parametrize("stream", [HEADS, IDS])
async def test_a_view_with_a_damaged_record_begins_anew(local: LocalModel, models: Models, stream: str) -> None:
    view = await released_twice(local)
    await models.close()
    change_value(models.folder / "log", "records", key_of(stream, view.position.number, 0, 0), bit=-1)
    local = await models.open()
    said = f"of release {view.position.number} of consumer 'top' is damaged"
    assert said in local.lost["top"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 9}, "it was made from version 9, but the model's newest is 3"),
        ({"seal": 9}, "was made from a version 3 that differs from the model's"),
        ({"after": 9}, "the log lacks releases before release"),
        ({"statistics": {}}, "is invalid"),
        ({"rows_taken": [3, 0]}, "the log lacks rows of release"),
    ],
)
async def test_a_view_whose_heads_contradict_the_model_begins_anew(
    local: LocalModel, models: Models, change: dict[str, object], said: str
) -> None:
    view = await released_twice(local)
    number = view.position.number
    (head,) = local.log.read(HEADS, number, number)
    local.log.append(HEADS, number, 0, 0, pack_json(unpack_json(head.payload) | change)).result()
    assert said in (await models.open()).lost["top"]


async def test_a_view_of_another_history_of_the_model_begins_anew(local: LocalModel, models: Models) -> None:
    view = await released_twice(local)
    record = {"history": view.history, "model_history": "another"}
    local.log.put(view_name("top"), pack_json(record)).result()
    assert (await models.open()).lost["top"] == "it belongs to another history of the model"


async def test_a_checkpoint_of_an_earlier_view_is_not_used(local: LocalModel, models: Models) -> None:
    """The consumer was deleted, and made again."""
    view = await released_twice(local)
    while view.state.backlog_rows:
        await view.make_release(TOP, 0)
    manifest = await local.checkpoint()
    ViewLog(local.log, "top").discard()
    local.views["top"] = again = View("top", local.model)
    await again.prepare(INT8)
    await local.cut(changed(3, USER, 3))
    await again.make_release(INT8, 0)
    assert again.position.number <= view.position.number
    await asyncio.to_thread(local.model.truncate_log, manifest, [again])
    bits = await bits_of(again)
    for _ in range(2):
        local = await models.open()
        assert local.lost == {}
        assert await bits_of(local.view()) == bits
        await local.checkpoint()
    number = again.position.number
    assert [record.number for record in local.log.read(HEADS)] == [number - 1, number]


async def test_the_log_is_truncated_to_the_second_newest_checkpoint(local: LocalModel, models: Models) -> None:
    """Heads stay longer: they show of which version older releases were made, and what their seals are."""
    local.options = ReleaseOptions(known_releases=3)
    view = await local.prepared_view(TOP)
    positions, manifests = [view.position], []
    for seed in range(1, 7):
        await local.cut(changed(seed, USER, seed))
        await view.make_release(TOP, 0)
        positions.append(view.position)
        if seed % 2 == 0:
            manifests.append(await local.checkpoint())
    await asyncio.to_thread(local.model.truncate_log, manifests[-2], [view])
    kept = [record.number for record in local.log.read(IDS)]
    assert kept == [each.number for each in positions[5:]], "back to the second newest checkpoint"
    assert [record.number for record in local.log.read(HEADS)] == [each.number for each in positions[-3:]]
    bits = await bits_of(view)
    local = await models.open()
    view = local.view()
    assert (await bits_of(view)).tables == bits.tables
    assert [view.seal_of(each.number) for each in positions[-3:]] == [each.seal for each in positions[-3:]]
