"""Views: what fails takes nothing else with it, in one process."""

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    TOP,
    USER,
    changed,
    held_by_a_replica,
    is_due,
    refuse,
    same_as_the_model,
)
from tests.unit.views.models import Models

from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType
from deltasync.feeds.frozen_release import Head
from deltasync.views.store import ViewStore

INT8 = Policy(top_k=1, value_type=ValueType.INT8)


@pytest.mark.parametrize("then", ["nothing", "a cut", "a restart"])
async def test_a_release_that_is_not_written_down_is_not_sent_and_is_made_again(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Else replicas at the release before would hold different bits."""
    view = await local.prepared_view(TOP)
    before, first = view.position, await held_by_a_replica(view)
    await local.cut(changed(1, USER, 3, 4))
    with monkeypatch.context() as patch:
        patch.setattr(ViewStore, "write_release", refuse)
        with pytest.raises(StorageFailed):
            await view.make_release(Policy(), 0)
        assert not (await view.release(before.number)).chunks
    assert (await held_by_a_replica(view))["user"].tobytes() == first["user"].tobytes()
    if then == "a cut":
        await local.cut(changed(1, USER, 9))
    if then == "a restart":
        local = await models.open()
        view = local.view()
        assert not list(local.log.read("releases/top"))
    assert view.position == before
    assert is_due(view, Policy())
    await view.make_release(Policy(), 0)
    assert not is_due(view, Policy())
    assert view.position.number > before.number
    decision, start = view.resume(before)
    assert (decision.yes, start) == (True, before)
    late = await view.release(before.number)
    assert [rows.ids.tolist() for rows in live_rows(late).values()] == [[3, 4, 9] if then == "a cut" else [3, 4]]
    assert same_as_the_model(await held_by_a_replica(view), local)
    held = view.position
    assert (await models.open()).view().seal_of(held.number) == held.seal


async def test_a_release_is_frozen_anew_after_a_failure(
    local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("deltasync.feeds.releases.freeze", refuse)
        failed = local.model.release(0)
        with pytest.raises(StorageFailed):
            await failed
    assert len(live_rows(await local.model.release(0))) == 2


@pytest.mark.parametrize("kind", ["user*.since", "user*.rows", "user*.stamps", "*", "shared"])
async def test_of_a_view_whose_files_are_missing_nothing_is_claimed(
    local: LocalModel, models: Models, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind != "shared":
        monkeypatch.setattr("deltasync.storage.table_files.SMALL_BYTES", 0)
    await local.prepared_view(TOP)
    files = [each for each in local.view_directory.rglob(kind) if each.is_file()]
    assert files
    for each in files:
        each.unlink()
    local = await models.open()
    with pytest.raises(StorageFailed):
        local.view()


async def test_versions_of_releases_are_found_while_others_are_made(local: LocalModel) -> None:
    """Releases are made on the model's thread, versions are asked for on another."""
    view = await local.prepared_view(TOP)
    history, later = view._store.history, count(13)

    @dataclass(frozen=True)
    class Meanwhile(Head):
        def __getattribute__(self, name: str) -> Any:
            if name == "number":
                history.add(Head(next(later), 9, 0, 0), 0)
            return super().__getattribute__(name)

    history._heads = deque([Head(10, 2, 0, 0), Meanwhile(11, 3, 0, 0), Meanwhile(12, 4, 0, 0)])
    assert [view.version_of(number) for number in (12, 11, 10)] == [4, 3, 2]
