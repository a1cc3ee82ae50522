"""Seals of releases: who holds a release of another past is recognised, also after a restart of the service."""

import shutil
from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import TOP, USER, changed, refuse, run, run_again

from deltasync.core.errors import StorageFailed
from deltasync.core.position import Position, next_epoch
from deltasync.views import history as histories
from deltasync.views.records import heads_stream
from deltasync.views.store import ViewStore
from deltasync.views.view import View


async def _release(local: LocalModel, view: View, seed: int) -> Position:
    await local.cut(changed(seed, USER, seed % 30))
    await view.make_release(TOP, 0)
    return view.position


async def _releases(local: LocalModel, seeds: range) -> list[Position]:
    view = await local.prepared_view(TOP)
    return [view.position, *[await _release(local, view, seed) for seed in seeds]]


def test_releases_have_seals_that_outlive_a_restart(tmp_path: Path) -> None:
    held = list[Position]()

    async def before(local: LocalModel) -> None:
        held.extend(await _releases(local, range(1, 6)))
        assert len({position.seal for position in held} - {0}) == len(held)

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert [view.seal_of(position.number) for position in held] == [position.seal for position in held]
        assert [view.version_of(position.number) for position in held[:-1]] == [
            position.number for position in held[:-1]
        ]  # Also known: of which version each was made; here every version led to one.
        for position in held:
            assert view.resume(position)[0].yes
            assert not view.resume(Position(position.history, position.number, position.seal ^ 1))[0].yes
        later = await _release(local, view, 9)
        assert later.number == held[-1].number + 1
        assert later.seal not in {position.seal for position in held}

    run(tmp_path, before)
    run_again(tmp_path, after)


@pytest.mark.parametrize("flushed", [False, True])
def test_what_a_copy_that_was_put_back_does_not_have_is_recognised(tmp_path: Path, flushed: bool) -> None:
    """Also where as many releases, of the same versions, have come since."""
    kept, discarded = list[Position](), list[Position]()

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        kept.extend([view.position, *[await _release(local, view, seed) for seed in range(1, 4)]])
        if flushed:
            view.flush()

    async def lost(local: LocalModel) -> None:
        view = local.view()
        discarded.extend([await _release(local, view, seed) for seed in range(4, 7)])

    async def again(local: LocalModel) -> None:
        view = local.view()
        for position in discarded:
            assert not view.resume(position)[0].yes
            assert view.discards(position, Position())
        for seed in range(4, 9):
            await _release(local, view, seed)
        for position in discarded:
            decision, start = view.resume(position)
            assert not decision.yes
            assert start.number == 0
            assert "of a past that this history does not have" in decision.reason
            assert view.discards(position, Position())
        for position in kept:
            assert view.resume(position)[0].yes
            assert not view.discards(position, Position())

    folder = tmp_path / "service"
    run(folder, before)
    shutil.copytree(folder, tmp_path / "copy")
    run_again(folder, lost)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "copy", folder)
    run_again(folder, again)


def test_a_version_from_before_the_policy_counts_by_its_seal(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        held = local.model.position
        view = await local.prepared_view(TOP)
        assert held.seal
        assert view.resume(held)[0].yes
        assert view.resume(Position(next_epoch(held.history), held.number, held.seal))[0].yes
        assert not view.resume(Position(held.history, held.number, held.seal ^ 1))[0].yes
        assert view.discards(Position(held.history, held.number, held.seal ^ 1), Position())

    run(tmp_path, scenario)


def test_a_version_from_after_the_policy_is_no_release(tmp_path: Path) -> None:
    """Say of a replica that has followed another consumer: releases count on from where the view began."""

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        for seed in range(1, 4):
            await local.cut(changed(seed, USER, seed))
        decision, start = view.resume(local.model.position)
        assert not decision.yes
        assert start == Position(view.history)
        assert "history" in decision.reason

    run(tmp_path, scenario)


def test_who_goes_on_from_before_the_policy_is_known_by_the_seal_of_the_release(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        held = local.model.position
        view = await local.prepared_view(TOP)
        _, start = view.resume(held)
        assert (start, start.seal) == (view.position, view.position.seal)

    run(tmp_path, scenario)


def test_only_the_newest_heads_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "KEPT_HEADS", 3)
    monkeypatch.setattr("deltasync.views.store.KEPT_HEADS", 3)

    async def scenario(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        for seed in range(1, 8):
            await _release(local, view, seed)
        view.flush()
        assert len(list(local.log.read(heads_stream("top")))) == 3

    run(tmp_path, scenario)


def test_a_release_that_is_written_down_later_has_the_seal_that_replicas_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[Position]()

    async def before(local: LocalModel) -> None:
        view = await local.prepared_view(TOP)
        await local.cut(changed(2, USER, 7))
        with monkeypatch.context() as patch:
            patch.setattr(ViewStore, "write_release", refuse)
            with pytest.raises(StorageFailed):
                await view.make_release(TOP, 0)
        await view.make_release(TOP, 0)
        held.append(view.position)
        held.append(await _release(local, view, 3))

    async def after(local: LocalModel) -> None:
        view = local.view()
        assert [view.seal_of(position.number) for position in held] == [position.seal for position in held]

    run(tmp_path, before)
    run_again(tmp_path, after)
