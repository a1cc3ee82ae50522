"""Views: what fails takes nothing else with it, in one process."""

import pytest
from tests.support.local_model import LocalModel
from tests.support.releases import live_rows
from tests.support.view_scenarios import (
    TOP,
    USER,
    bits_of,
    changed,
    held_by_a_replica,
    is_due,
    refuse,
    same_as_the_model,
)
from tests.unit.views.models import Models

from deltasync.base.errors import ServiceUnavailable, StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import DamagedRows
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType
from deltasync.log.log_store import LogFull
from deltasync.model.releases import FrozenRelease
from deltasync.views.view import View

INT8 = Policy(top_k=1, value_type=ValueType.INT8)


async def refused_release(local: LocalModel) -> tuple[View, Position]:
    """A view whose release the log has refused, and the position before that."""
    view = await local.prepared_view(TOP)
    before = view.position
    await local.cut(changed(1, USER, 3, 4))
    with local.log_that(refuse), pytest.raises(StorageFailed, match="the disk is full"):
        await view.make_release(Policy(), 0)
    return view, before


@pytest.mark.parametrize("then", ["nothing", "a cut", "a restart", "another policy"])
async def test_a_refused_release_is_hidden_and_written_first(local: LocalModel, models: Models, then: str) -> None:
    """Else replicas at the release before would hold different bits."""
    view, before = await refused_release(local)
    wait = view.release(before.number)
    assert (view.position, is_due(view, Policy()), wait.done()) == (before, True, False)
    policy = Policy(value_type=ValueType.FP16) if then == "another policy" else Policy()
    if then == "a cut":
        await local.cut(changed(1, USER, 9))
    if then == "a restart":
        local = await models.open()
        view = local.view()
        assert view.position == before
    await view.prepare(policy)
    await view.make_release(policy, 0)
    again = then in ("a cut", "another policy")  # That needs a release of its own.
    assert view.position.number == before.number + (2 if again else 1)
    assert view.version_of(before.number + 1) == 2
    assert not is_due(view, Policy())
    decision, start = view.continue_from(before)
    assert (decision.yes, start) == (True, before)
    late = await view.release(before.number)
    assert isinstance(late, FrozenRelease)
    ids = {"a cut": [3, 4, 9], "another policy": [*range(40)]}.get(then, [3, 4])
    assert live_rows(late)[0].ids.tolist() == ids
    if then != "another policy":
        assert same_as_the_model(await held_by_a_replica(view), local)
    if then != "a restart":
        sent = await wait
        assert isinstance(sent, FrozenRelease)
        assert sent.head
        assert sent.head.number > before.number
    held = view.position
    assert (await models.open()).view().seal_of(held.number) == held.seal


async def test_a_checkpoint_includes_a_release_refused_by_a_full_log(local: LocalModel, models: Models) -> None:
    """There may be no room in the log before it is cut, and it is cut once there are checkpoints."""
    view, before = await refused_release(local)
    for _ in range(2):
        await local.checkpoint()
    assert view.position == before
    local = await models.open()
    again = local.view()
    assert again.position.number == before.number + 1
    assert same_as_the_model(await held_by_a_replica(again), local)
    await local.cut(changed(2, USER, 3))
    await again.make_release(TOP, 0)
    for held in (before, Position(before.history, before.number + 1, again.seal_of(before.number + 1))):
        assert again.continue_from(held)[0].yes
    bits = await bits_of(again)
    assert await bits_of((await models.open()).view()) == bits


async def test_a_checkpoint_waits_for_a_release_on_its_way_to_the_log(local: LocalModel) -> None:
    view, states = await local.prepared_view(TOP), list[object]()
    await local.cut(changed(1, USER, 3))
    with local.log_that(lambda _stream: states.append(view.checkpoint_state())):
        await view.make_release(TOP, 0)
    assert states == [None, None]
    assert await local.model.on_thread(view.checkpoint_state)


async def test_a_log_without_room_for_ids_refuses_the_head_too(local: LocalModel, models: Models) -> None:
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3))
    before, full = view.position, LogFull("the log is full")
    with (
        local.log_that(lambda stream: full if stream == "releases/top" else None),
        pytest.raises(StorageFailed, match="the log is full"),
    ):
        await view.make_release(TOP, 0)
    assert view.position == before
    await view.make_release(TOP, 0)
    bits = await bits_of(view)
    assert await bits_of((await models.open()).view()) == bits


@pytest.mark.parametrize("policy", [TOP, INT8, Policy(mode=Mode.IDS)])
async def test_damaged_rows_of_the_model_are_in_no_release(local: LocalModel, policy: Policy) -> None:
    """Rows that were taken before them are shown to nobody either: the model is loaded again, with its views."""
    view = await local.prepared_view(policy)
    before = view.position
    await local.cut(changed(1, USER, *range(40)))
    local.model.tables[0].rows[39, 0] += 1
    with pytest.raises(DamagedRows, match="table 'user': bits have changed in row 39"):
        await view.make_release(Policy(), 0)
    assert "row 39" in local.model.tables.failed
    assert (view.position, view.checkpoint_state()) == (before, None)
    for given in (view.release(0), view.make_release(TOP, 0)):
        with pytest.raises(ServiceUnavailable, match="row 39"):
            await given


async def test_a_new_view_has_no_damaged_rows_of_the_model(local: LocalModel) -> None:
    local.model.tables[0].rows[3, 0] += 1
    view = local.view()
    with pytest.raises(DamagedRows):
        await view.prepare(INT8)
    assert "row 3" in local.model.tables.failed
    assert not view.tables


async def test_damaged_rows_of_a_view_are_sent_to_nobody(local: LocalModel) -> None:
    view = await local.prepared_view(INT8)
    view.state.tables[0].held.rows[7, 0] ^= 1
    with pytest.raises(DamagedRows):
        await view.release(0)
    assert "row 7" in local.model.tables.failed


async def test_a_replica_at_the_last_release_gets_rows_as_they_were_encoded(local: LocalModel) -> None:
    """They are not read again, so a bit that flips meanwhile does not matter."""
    view = await local.prepared_view(INT8)
    await view.release(view.position.number - 1)  # A replica follows release by release.
    before = view.position.number
    await local.cut(changed(1, USER, 3, 4))
    await view.make_release(Policy(), 0)
    view.state.tables[0].held.rows[3, 0] ^= 1
    given = await view.release(before)
    assert isinstance(given, FrozenRelease)
    assert live_rows(given)[0].ids.tolist() == [3, 4]
    with pytest.raises(DamagedRows):
        await view.release(before - 1)
