# mypy: disable-error-code="union-attr, operator"
"""The lag of a consumer with a policy: what is known is said, and nothing else."""

import asyncio
import time
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.seals import sealed
from tests.support.view_scenarios import ITEM, TOP, USER, changed, run, run_again
from tests.unit.support.async_tests import as_test

from deltasync.base.clock import steady_ns
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.consumers.consumer import Consumer, Pause, Replica
from deltasync.consumers.follow import Follow
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import TableSpec
from deltasync.model.feed import FeedStatus
from deltasync.status.lag import report
from deltasync.status.metrics import consumer_metrics
from deltasync.status.records import ConsumerStatus
from deltasync.views.view import View

in_model = partial(as_test, run)


async def lag_at(view: View, release: int, *, connected: bool = True) -> ConsumerStatus:
    """Of a consumer whose replica holds that release."""
    return report_of(view, release, view.status(Policy()), connected=connected)


def report_of(view: View, release: int, status: FeedStatus, *, connected: bool = True) -> ConsumerStatus:
    replica = Replica(
        "a", Position(view.history, release), stream=asyncio.Event() if connected else None, checked=True
    )
    consumer = Consumer("top", "clicks", 0, replicas={"a": replica})
    return report(consumer, status, time.time_ns())


def a_second_from_one_look_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the model's clock: how fast this machine is does not matter."""
    monkeypatch.setattr("deltasync.model.model.steady_ns", partial(next, count(steady_ns(), 10**9)))


RELEASE = ["number", "version", "seconds_ago", "rows", "bytes", "norm", "left_rows", "left_bytes", "left_norm"]
RELEASE += ["reason"]


async def release_all(view: View, local: LocalModel, versions: int) -> None:
    for seed in range(1, versions + 1):
        await local.cut(changed(seed, USER, 3, 4))
        await view.make_release(Policy(), 0)


def test_who_is_one_release_behind_after_a_restart_lacks_one_version(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        await release_all(await local.prepared_view(Policy()), local, 10)

    async def again(local: LocalModel) -> None:
        view = local.view()
        before = view.position.number
        await view.make_release(Policy(), 0)
        assert (await lag_at(view, before)).lag.versions == 0
        await release_all(view, local, 1)
        assert view.position.number == before + 1
        lag = await lag_at(view, before)
        assert (lag.lag.versions, lag.lag.rows, lag.state) == (1, 2, "behind")
        assert lag.replicas[0].behind

    run(tmp_path, scenario)
    run_again(tmp_path, again)


@in_model()
async def test_who_follows_no_table_waits_for_one(local: LocalModel) -> None:
    view = await local.prepared_view(Policy(tables=("usr*",)))
    consumer = Consumer("top", "clicks", 0, Policy(tables=("usr*",)), {"a": Replica("a", stream=asyncio.Event())})
    lag = report(consumer, view.status(consumer.policy), time.time_ns())
    assert (lag.state, lag.reason) == ("waiting", "no table of model 'clicks' matches usr*")
    await local.add(TableSpec("usr", 3, 2))
    lag = report(consumer, view.status(consumer.policy), time.time_ns())
    assert lag.state == "behind"


@in_model()
async def test_what_is_unsent_is_known_only_while_somebody_looks(local: LocalModel) -> None:
    """Versions that have come while nobody is connected were not looked at."""
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3, 4))
    await view.make_release(TOP, 0)
    number = view.position.number
    for connected in (True, False):
        known = await lag_at(view, number, connected=connected)
        assert known.lag.unsent_norm
        assert known.tables[0].unsent_norm
    await local.cut(changed(2, ITEM, 3, 4))
    lag = await lag_at(view, number, connected=False)
    assert (lag.lag.versions, lag.lag.rows) == (1, 3)
    assert (lag.lag.unsent_norm, lag.lag.unsent_share) == (None, None)
    assert [(table.unsent_norm, table.unsent_share) for table in lag.tables] == [(None, None)] * 2


@in_model()
async def test_who_has_every_release_is_as_late_as_what_was_published_since(
    local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as old as the rows that the policy left; these have an age of their own."""
    a_second_from_one_look_to_the_next(monkeypatch)
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3, 4))
    await view.make_release(TOP, 0)
    lag = await lag_at(view, view.position.number)
    assert (lag.state, lag.lag.versions, lag.lag.rows, lag.lag.seconds) == ("current", 0, 1, 0)
    assert lag.oldest_row_seconds > 0
    assert [table.oldest_row_seconds > 0 for table in lag.tables] == [True, False]
    await local.cut(changed(2, USER, 9))
    lag = await lag_at(view, view.position.number)
    assert lag.lag.versions == 1
    assert [(each.behind, each.reason) for each in lag.replicas] == [(False, "")]  # Nothing of it was released.
    assert 0 < lag.lag.seconds <= lag.oldest_row_seconds


@in_model()
async def test_a_current_replica_is_not_late_for_a_version_sealed_meanwhile(
    local: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports are put together on another thread, from where things stood, with rows that the policy left."""
    a_second_from_one_look_to_the_next(monkeypatch)
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3, 4))
    await view.make_release(TOP, 0)
    number, status = view.position.number, view.status(TOP)
    await local.cut(changed(2, USER, 9))
    lag = report_of(view, number, status)
    assert (lag.state, lag.lag.versions, lag.lag.seconds) == ("current", 0, 0)


@in_model()
async def test_who_waits_for_the_first_release_holds_nothing_that_is_current(local: LocalModel) -> None:
    view = local.view()
    view.trouble = "there is no room"
    lag = await lag_at(view, 0)
    assert (lag.state, lag.lag.versions, lag.lag.rows) == ("behind", 1, USER.rows + ITEM.rows)


@in_model()
async def test_a_table_that_replicas_are_still_to_get_is_lacking_as_a_whole(local: LocalModel) -> None:
    """Releases of the others go on meanwhile: where there is no room for it, for long."""
    extra = TableSpec("extra", 5, 2)
    view = await local.prepared_view(Policy())
    await local.add(extra)
    assert (await lag_at(view, view.position.number)).state == "in sync"
    await local.cut(changed(1, extra, *range(5)))
    await view.make_release(Policy(), 0)
    lag = await lag_at(view, view.position.number)
    assert (lag.state, lag.lag.versions, lag.lag.rows, lag.lag.bytes) == ("current", 0, 5, 5 * (8 + 8))
    assert lag.lag.unsent_norm is None
    assert [table.table for table in lag.tables] == ["user", "item", "extra"]
    await view.prepare(Policy())
    assert (await lag_at(view, view.position.number)).state == "in sync"


@in_model()
async def test_the_answer_has_the_keys_that_tools_read_in_their_order(local: LocalModel) -> None:
    view = await local.prepared_view(TOP)
    await local.cut(changed(1, USER, 3, 4))
    await view.make_release(TOP, 0)
    answer = asdict(await lag_at(view, view.position.number))
    assert list(answer["release"]) == RELEASE
    assert (answer["release"]["rows"], answer["release"]["left_rows"]) == (1, 1)
    assert (answer["release"]["bytes"], answer["release"]["left_bytes"]) == (40, 40)
    assert answer["release"]["norm"] >= answer["release"]["left_norm"] > 0


@in_model()
async def test_a_pause_hides_no_failure(local: LocalModel) -> None:
    """Whoever is alerted to it is alerted meanwhile."""
    view = await local.prepared_view(TOP)
    view.failure = "its releases cannot be made"
    replica = Replica("a", stream=asyncio.Event())
    consumer = Consumer("top", "clicks", 0, replicas={"a": replica}, pause=Pause(0, "anna"))
    lag = report(consumer, view.status(consumer.policy), time.time_ns())
    assert (lag.state, lag.paused and lag.paused.otherwise) == ("paused", "failed")
    (failed,) = (each for each in consumer_metrics([lag]) if each.name.endswith("consumer_failed"))
    assert [sample.value for sample in failed.samples] == [1]


@in_model()
async def test_the_time_for_which_a_kept_version_is_followed_is_counted(local: LocalModel) -> None:
    kept = KeptVersion(model="clicks", name="good", id="i", seal=sealed(1), bytes=1, kept_unix_ns=0, by="anna")
    consumer, now_unix_ns = Consumer("top", "clicks", 0), 10_000_000_000
    status = (await local.prepared_view(TOP)).status(TOP)

    def counted() -> float:
        metrics = {each.name: each for each in consumer_metrics([report(consumer, status, now_unix_ns)])}
        (sample,) = metrics["deltasync_consumer_follows_seconds"].samples
        return sample.value

    assert counted() == 0
    for since, seconds in ((4_000_000_000, 6), (11_000_000_000, 0)):  # The clock may have been set back.
        consumer.follows = Follow(kept, since, "anna")
        assert counted() == seconds
