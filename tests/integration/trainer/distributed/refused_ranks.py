"""The ranks of test_refusals. Rank 0 hosts the store and ends at once; the others are far away from the store."""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.proxy import Proxy
from tests.support.ranks import leave
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.sync import DeltaSync, SyncOptions

WAIT = 20.0


def options_differ(service: str, rank: int) -> None:
    with pytest.raises(DeltasyncError) as refused:
        DeltaSync(nn.Linear(2, 1), SyncOptions(service=service, model="apart", publish_every=1 + rank))
    text = "DeltaSync: publish_every is 1 on rank 0, 2 on rank 1, 3 on rank 2; all ranks need the same"
    assert str(refused.value) == text, str(refused.value)


def a_cut_is_refused(service: str, rank: int) -> None:
    model = nn.Linear(2, 1)
    sync = DeltaSync(model, SyncOptions(service=service, model="refused", publish_every=1))
    if rank == 0:
        model.weight.data[0, 1] = float("nan")
    with pytest.raises(DeltasyncError) as refused:
        sync.flush(WAIT)
    assert "rank 0: " in str(refused.value)
    assert "row 0 holds nan" in str(refused.value)
    sync.abort()


def a_rank_closes_a_step_early(service: str, rank: int) -> None:
    model = nn.Linear(2, 1)
    sync = DeltaSync(model, SyncOptions(service=service, model="early", publish_every=1))
    for _ in range(2):
        model.weight.data += 1
        sync.step()
    end = partial(sync.close, WAIT) if rank == 0 else sync.step
    with pytest.raises(DeltasyncError) as refused:
        end()
    assert str(refused.value) == (
        "DeltaSync: rank 0 at step 2, ranks 1, 2 at step 3: all ranks must make the same calls, and close it "
        "after the same step"
    ), str(refused.value)


def a_rank_ends_a_step_early(service: str, rank: int) -> None:
    sync = DeltaSync(nn.Linear(2, 1), SyncOptions(service=service, model="ended", publish_every=1))
    sync.step()
    if rank == 0:
        return
    with pytest.raises(DeltasyncError) as refused:
        sync.step()
    text = "DeltaSync, at step 2, needs a rank that has ended, or cannot be reached: all ranks must close it after"
    assert str(refused.value).startswith(text), str(refused.value)


PLAYS: list[Callable[[str, int], None]] = [
    options_differ,
    a_cut_is_refused,
    a_rank_closes_a_step_early,
    a_rank_ends_a_step_early,
]


def joined(folder: Path, rank: int, ranks: int) -> None:
    """Join a group whose store is in rank 0; what other ranks ask of it takes a while."""
    port = folder / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "new").write_text(str(store.port))
        (folder / "new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        proxy = Proxy(f"127.0.0.1:{port.read_text()}")
        proxy.delay_seconds = 0.02 * rank
        store = TCPStore("127.0.0.1", int(proxy.address.rpartition(":")[2]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


if __name__ == "__main__":
    name, service, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    joined(Path(folder), rank, int(os.environ["WORLD_SIZE"]))
    next(play for play in PLAYS if play.__name__ == name)(service, rank)
    leave()
