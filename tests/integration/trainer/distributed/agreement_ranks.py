"""The ranks of test_agreement: no rank is left waiting for another."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.resharded import on_rank, reshard
from tests.integration.trainer.torchrec_defects.models import bags, kernels_of, sharded
from tests.support.proxy import Proxy
from tests.support.ranks import leave

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.trainer.distributed import ranks as ranks_module
from deltasync.trainer.distributed.agreement import on_any_rank
from deltasync.trainer.distributed.ranks import begun_together
from deltasync.trainer.distributed.sharding import OptimizerOptions, click_tables, shard
from deltasync.trainer.example.model import ClickModel
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.pipelines import LockstepBatches, OnlinePipeline, PipelineOptions
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

SIZES = ModelOptions(users=20, items=30, cross_buckets=10, dim=4, hidden=4)
PATIENCE_SECONDS = 60.0


def delta_sync(service: str) -> tuple[torch.nn.Module, DeltaSync]:
    model, _ = shard(
        ClickModel(SIZES, torch.device("meta")), click_tables(), OptimizerOptions(), torch.device("cpu")
    )
    return model, DeltaSync(model, SyncOptions(service=service, model="clicks"))


def claims_that_differ_make_a_full_push(service: str) -> None:
    _, sync = delta_sync(service)
    sync.flush(PATIENCE_SECONDS)
    early, full = sync.state_dict(), sync.stats.rows
    sync.tracker.step()
    sync.flush(PATIENCE_SECONDS)
    late = sync.state_dict()
    assert early["version"] < late["version"]
    sync.abort()
    # As if the cut had been sealed, but one rank had not heard of it when the checkpoint was taken.
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, late if dist.get_rank() == 0 else late | {"version": early["version"]})
    _, resumed = delta_sync(service)
    resumed.load_state_dict(states)
    resumed.flush(PATIENCE_SECONDS)
    assert resumed.stats.rows == full, (dist.get_rank(), resumed.stats.rows, full)
    resumed.abort()


def states_of_different_versions_go_on_from_the_lowest(service: str) -> None:
    """As in a checkpoint that was taken while a cut was being sealed."""
    _, sync = delta_sync(service)
    sync.flush(PATIENCE_SECONDS)
    early, full = sync.state_dict(), sync.stats.rows
    user = next(table.shards[0] for table in sync.tracker.tables if table.name.endswith("user"))
    user.weight[0] += 1
    sync.tracker.mark(user.shard.table.name, torch.tensor([user.shard.row_offset]))
    late = sync.state_dict() | {"tracker": sync.tracker.state_dict()}
    sync.flush(PATIENCE_SECONDS)
    noted = sync.state_dict() | {"tracker": sync.tracker.state_dict()}
    sync.abort()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, noted if dist.get_rank() == 0 else late)
    assert [state["version"] - early["version"] for state in states] == [1, 0]
    _, resumed = delta_sync(service)
    resumed.load_state_dict(states)
    resumed.flush(PATIENCE_SECONDS)
    assert 1 <= resumed.stats.rows < full, (dist.get_rank(), resumed.stats.rows, full)
    assert resumed.state_dict()["version"] == early["version"] + 2
    resumed.abort()


def a_part_refused_on_one_rank_fails_on_all(service: str) -> None:
    _, sync = delta_sync(service)
    sync.flush(PATIENCE_SECONDS)
    if dist.get_rank() == 0:
        user = next(table.shards[0] for table in sync.tracker.tables if table.name.endswith("user"))
        user.weight[3, 1] = float("nan")
    sync.mark_all()
    check_refused(sync, "row 3 holds nan")


def check_refused(sync: DeltaSync, why: str) -> None:
    """A flush fails on all ranks with the words of rank 0, which is refused alone."""
    with pytest.raises(InvalidInput, match=f"rank 0: .*{why}"):
        sync.flush()
    sync.abort()


def buffers_that_are_refused_on_one_rank_fail_on_all(service: str) -> None:
    unsaved: Any = torch.nn.Linear(2, 1)
    unsaved.register_buffer("seen", torch.zeros(2), persistent=False)
    sync = DeltaSync(unsaved, SyncOptions(service=service, model="refused-at-first"))
    unsaved.seen = torch.ones(2)
    check_refused(sync, "'seen' has changed")
    for model, wrong, published in (
        ("refused-type", torch.zeros(2, dtype=torch.bfloat16), False),
        ("refused", torch.zeros(3), True),
    ):
        norm: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        sync = DeltaSync(norm, SyncOptions(service=service, model=model))
        if published:
            sync.flush(PATIENCE_SECONDS)
        norm[0].running_mean = wrong
        sync.tracker.step()
        check_refused(sync, "'0.running_mean' is")


def buffers_that_differ_are_named_once(service: str) -> None:
    """Those that differ at first, and those that come to differ: as of a model that has just been made."""
    for name, at_first in ("differing", True), ("coming-to-differ", False):
        model: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3))
        if at_first:
            model[1].running_mean.fill_(dist.get_rank())
        sync = DeltaSync(model, SyncOptions(service=service, model=name, publish_every=1))
        with mock.patch("deltasync.trainer.sync.logger") as logger:
            sync.flush(PATIENCE_SECONDS)
            for norm in () if at_first else model:
                norm.running_mean += dist.get_rank()
                for _ in range(2):
                    sync.tracker.step()
                    sync.flush(PATIENCE_SECONDS)
            model[0].running_mean += 1
            sync.tracker.step()
            sync.flush(PATIENCE_SECONDS)
        named = [mock.call.warning(mock.ANY, f"{place}.running_mean") for place in range(2)]
        expected = named[at_first:] if dist.get_rank() == 0 else []
        assert [each for each in logger.mock_calls if "running_mean" in str(each)] == expected, logger.mock_calls
        sync.abort()


def ranks_cut_after_the_same_steps(service: str) -> None:
    """The network of rank 1 is slow and loses answers, so that rank 0 knows earlier that a cut is sealed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    with Proxy(service) as proxy:
        address = proxy.address if dist.get_rank() == 1 else service
        sync = DeltaSync(model, SyncOptions(service=address, model="in-step", publish_every=1))
        sync.flush(PATIENCE_SECONDS)
        proxy.delay_seconds = 0.01
        for step in range(12):
            if step % 4 == 0:
                proxy.cut_after("down", 1)
            model.weight.data += 1
            with torch.profiler.profile() as profile:
                sync.step()
            collectives = [event.name for event in profile.events() if event.name.startswith("gloo:")]
            # Ranks gather digests of their buffers with cuts 1, 2, 4, 8 and so on.
            assert collectives in (["gloo:all_reduce"], ["gloo:all_reduce", "gloo:all_gather"]), collectives
        sync.flush(PATIENCE_SECONDS)
        cuts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(cuts, [(version, step) for version, step, _ in sync.stats.cuts])
        assert cuts[0] == cuts[1], cuts
        assert [version for version, _ in cuts[0]] == [*range(1, len(cuts[0]) + 1)]
        sync.close(PATIENCE_SECONDS)


def closed_ones_leave_no_threads(service: str) -> None:
    """Those of a group could still drop what a collective has used while the interpreter shuts down."""
    before = group_threads()
    _, sync = delta_sync(service)
    sync.flush(PATIENCE_SECONDS)
    assert group_threads() > before
    position = sync.close(PATIENCE_SECONDS)
    assert group_threads() == before
    assert sync.close() == position
    sync.abort()
    with pytest.raises(InvalidInput, match="is closed"):
        sync.flush()


def options_that_differ_are_named_on_all_ranks(service: str) -> None:
    """Each class compares all of its options, but those that may differ."""
    model, rank = torch.nn.Linear(2, 1), dist.get_rank()
    sync = SyncOptions(service=service, model="clicks", fqns_to_skip=["bias"] if rank else [])
    assert vars(sync).keys() - sync.of_all_ranks.keys() == {"service"}
    check_refused_on_all(
        partial(DeltaSync, model, sync),
        "DeltaSync: fqns_to_skip is [] on rank 0, ['bias'] on rank 1; all ranks need the same",
    )
    tables = sharded({"bags": bags("t0")})
    tracker = TrackerOptions(mode=TrackingMode.EMBEDDING if rank else TrackingMode.ID_ONLY)
    assert vars(tracker).keys() - tracker.of_all_ranks.keys() == {"dense", "replicas"}
    check_refused_on_all(
        partial(Tracker, tables, tracker),
        "Tracker: mode is TrackingMode.ID_ONLY on rank 0, TrackingMode.EMBEDDING on rank 1; "
        "all ranks need the same",
    )
    Tracker(tables, TrackerOptions(dense=rank == 0, replicas=rank == 0)).close()
    own: dict[str, Any] = {
        "not_ahead": ["bags"],
        "custom_model_fwd": tables.forward,
        "enqueue_batch_after_forward": True,
    }
    options = PipelineOptions(amp_dtype=torch.float16 if rank else torch.bfloat16)
    assert vars(options).keys() - options.of_all_ranks.keys() == own.keys()
    pipeline = partial(OnlinePipeline, tables, torch.optim.SGD(tables.parameters()), torch.device("cpu"))
    check_refused_on_all(
        partial(pipeline, options),
        "OnlinePipeline: amp_dtype is torch.bfloat16 on rank 0, torch.float16 on rank 1; all ranks need the same",
    )
    pipeline(PipelineOptions(**own if rank else {}))


def check_refused_on_all(make: Callable[[], object], why: str, kind: type[DeltasyncError] = InvalidInput) -> None:
    with pytest.raises(kind) as refused:
        make()
    assert str(refused.value) == why, (dist.get_rank(), str(refused.value))


def what_one_rank_cannot_track_is_refused_on_all(_service: str) -> None:
    """Only one rank has rows of the table, and sees that its optimizer cannot be followed."""
    on_rank_1 = {"t0": on_rank(1)}
    model = sharded({"bags": bags("t0")}, on_rank_1, dense=True)  # Else it cannot be resharded.
    tracker = Tracker(model)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, tracker.state_dict())
    if dist.get_rank() == 1:
        states[1]["tables"] = None
    with pytest.raises(InvalidInput, match=r"^rank 1: this is not the state of a tracker, or it is damaged"):
        tracker.load_state_dict(states)
    reshard(model, "bags", t0=on_rank(0))
    for kernel in kernels_of(model):
        kernel.optimizer = EmbOptimType.NONE
    with pytest.raises(InvalidInput, match=r"^rank 0: module 'bags', tables 't0': rows under optimizer 'none'"):
        tracker.step()


def a_restart_reads_nothing_of_the_ranks_before(_service: str) -> None:
    """As torchrun restarts them: other processes, and the store that there was."""

    def attempt(number: int, fails: bool) -> None:
        with (
            mock.patch.object(ranks_module, "_MADE", Counter[str]()),
            mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=str(number)),
            begun_together("a start"),
        ):
            if fails and dist.get_rank() == 1:
                raise DeltasyncError("no memory")

    check_refused_on_all(partial(attempt, 0, True), "rank 1: no memory", DeltasyncError)
    attempt(1, False)


def a_rank_that_waits_says_for_which(service: str) -> None:
    model, world, numbers = torch.nn.Linear(2, 1), dist.group.WORLD, count()
    assert world
    store = world.get_group_store()

    @contextmanager
    def rank_1_comes_late(said: str) -> Iterator[None]:
        key, lines = f"said {next(numbers)}", list[str]()
        handler = mock.Mock(level=logging.WARNING, handle=lambda record: tell(record.getMessage()))

        def tell(line: str) -> None:
            lines.append(line)
            store.set(key, line)

        if dist.get_rank() == 1:
            store.wait([key])
        logger = logging.getLogger(ranks_module.__name__)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
        if dist.get_rank() == 0:  # It may wait for the rest of what rank 1 does, too.
            assert lines[0] == f"rank 0 has waited 0 s for {said}", lines

    same = "all ranks must make the same calls"
    with mock.patch.object(ranks_module, "_FIRST_SECONDS", 0.05):
        with rank_1_comes_late("rank 1 to reach DeltaSync, as all ranks must"):
            sync = DeltaSync(model, SyncOptions(service=service, model="waiting", publish_every=100))
        sync.step()
        dist.barrier()
        with rank_1_comes_late(f"rank 1 (last seen at step 1), in DeltaSync, at step 1: {same}"):
            sync.flush(PATIENCE_SECONDS)
        with rank_1_comes_late("rank 1 to reach LockstepBatches, as all ranks must"):
            together = LockstepBatches(range(3))
        assert next(together) == 0
        with rank_1_comes_late(f"rank 1 (last seen at batch 1), in LockstepBatches, at batch 2: {same}"):
            assert next(together) == 1
        with rank_1_comes_late("the other ranks to reach a checkpoint"):
            assert on_any_rank([dist.get_rank() == 1], "a checkpoint") == [True]
    if dist.get_rank() == 1:
        sync.abort()
    else:
        with pytest.raises(DeltasyncError) as left:
            sync.flush()
        assert str(left.value) == (
            "DeltaSync, at step 1, needs rank 1 (closed at step 1): all ranks must close it after the same step"
        )
        sync.abort()


def group_threads() -> int:
    return sum(name.read_text().strip() == "pt_gloo_runloop" for name in Path("/proc/self/task").glob("*/comm"))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for play in (
        claims_that_differ_make_a_full_push,
        states_of_different_versions_go_on_from_the_lowest,
        a_part_refused_on_one_rank_fails_on_all,
        buffers_that_differ_are_named_once,
        buffers_that_are_refused_on_one_rank_fail_on_all,
        ranks_cut_after_the_same_steps,
        closed_ones_leave_no_threads,
        options_that_differ_are_named_on_all_ranks,
        what_one_rank_cannot_track_is_refused_on_all,
        a_restart_reads_nothing_of_the_ranks_before,
        a_rank_that_waits_says_for_which,
    ):
        play(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
    leave()
