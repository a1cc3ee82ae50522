"""Seals of releases: who holds a release of another past is recognised, also after a restart of the service."""

import shutil
from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import TOP, USER, changed
from tests.unit.views.models import Models

from deltasync.core.position import Position, next_epoch
from deltasync.views.view import View


async def _release(local: LocalModel, view: View, seed: int) -> Position:
    await local.cut(changed(seed, USER, seed % 30))
    await view.make_release(TOP, 0)
    return view.position


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_releases_that_a_restored_copy_lacks_are_recognised(
    tmp_path: Path, local: LocalModel, models: Models, checkpoint: bool
) -> None:
    """Also where as many releases, of the same versions, have come since."""
    view = await local.prepared_view(TOP)
    kept = [view.position, *[await _release(local, view, seed) for seed in range(1, 4)]]
    if checkpoint:
        await local.checkpoint()
    await models.close()
    shutil.copytree(models.folder, tmp_path / "copy")
    local = await models.open()
    view = local.view()
    discarded = [await _release(local, view, seed) for seed in range(4, 7)]
    await models.close()
    shutil.rmtree(models.folder)
    shutil.copytree(tmp_path / "copy", models.folder)
    local = await models.open()
    view = local.view()
    for position in discarded:
        assert not view.continue_from(position)[0].yes
        assert view.discards(position, Position())
    for seed in range(4, 9):
        await _release(local, view, seed)
    for position in discarded:
        decision, start = view.continue_from(position)
        assert not decision.yes
        assert start.number == 0
        assert "which is not in the service's history" in decision.reason
        assert view.discards(position, Position())
    for position in kept:
        assert view.continue_from(position)[0].yes
        assert not view.discards(position, Position())


async def test_a_version_from_before_the_policy_counts_by_its_seal(local: LocalModel) -> None:
    """Releases count on from where the view began: a later version is of who has followed another consumer."""
    held = local.model.position
    view = await local.prepared_view(TOP)
    assert held.seal
    decision, start = view.continue_from(held)
    assert (decision.yes, start, start.seal) == (True, view.position, view.position.seal)
    assert view.continue_from(Position(next_epoch(held.history), held.number, held.seal))[0].yes
    other = Position(held.history, held.number, held.seal ^ 1)
    assert not view.continue_from(other)[0].yes
    assert view.discards(other, Position())
    for seed in range(1, 4):
        await local.cut(changed(seed, USER, seed))
    decision, start = view.continue_from(local.model.position)
    assert (decision.yes, start) == (False, Position(view.history))
    assert "history" in decision.reason
