"""Once `flush` or `close` returns, a replica has the model as it is, whatever came after the last step."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.following import WAIT, subscriber
from tests.integration.trainer.torchrec_defects.models import DIM, bags, distributed
from tests.support.server import RunningService
from tests.support.waiting import wait_for
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.client import NumpyTarget, Position
from deltasync.trainer.sync import DeltaSync, SyncOptions

# TorchRec wraps models in DDP as torch no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Ranker(nn.Module):
    """A sharded table, whose rows change within backward, a buffer and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags("user")
        self.over = nn.Linear(DIM, 1)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        scores: torch.Tensor = self.over(self.bags(features).values())
        return scores


def ids(*rows: int) -> KeyedJaggedTensor:
    lengths = torch.ones(len(rows), dtype=torch.int32)
    return KeyedJaggedTensor.from_lengths_sync(["user"], torch.tensor(rows), lengths)


def backward(model: nn.Module) -> None:
    model(ids(3, 5)).sum().backward()


def forward_in_training(model: nn.Module) -> None:
    model(ids(1))


def write_to_a_buffer(model: nn.Module) -> None:
    model.module.seen.fill_(7)  # type: ignore[operator,union-attr]


def optimizer_step(model: nn.Module) -> None:
    backward(model)
    torch.optim.SGD(model.parameters(), 0.1).step()


def load(model: nn.Module) -> None:
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in model.module.over.state_dict().items()}  # type: ignore[union-attr]
    model.module.over.load_state_dict(state)  # type: ignore[union-attr]


AFTERWARDS = [backward, forward_in_training, write_to_a_buffer, optimizer_step, load]


@pytest.fixture
def model(lone_rank: None) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = distributed(Ranker(), {}, EmbOptimType.EXACT_SGD)
    return model


def assert_published(running: RunningService, head: Position, model: nn.Module) -> None:
    """A new replica is given what the model holds."""
    target = NumpyTarget()
    with subscriber(running, target) as replica:
        replica.wait_for(head, WAIT)
    for name, tensor in model.state_dict().items():
        sharded = hasattr(tensor, "local_shards")
        rows = tensor.local_shards()[0].tensor if sharded else tensor
        held = target.tables[name.removesuffix(".weight") if sharded else name]
        np.testing.assert_array_equal(held, rows.numpy().reshape(held.shape), err_msg=name, strict=True)


@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize("verify", [False, True])
def test_flush_publishes_what_came_after_the_last_step(
    running: RunningService, model: nn.Module, afterwards: Callable[[nn.Module], None], verify: bool
) -> None:
    options = SyncOptions(service=running.grpc, model="clicks", publish_every=1, verify=verify)
    with DeltaSync(model, options) as sync:
        backward(model)
        sync.step()
        before = sync.flush()
        afterwards(model)
        after = sync.flush()
        assert after.number == before.number + 1
        assert_published(running, after, model)
        assert sync.flush() == after, "nothing has changed since"


def test_close_does_so_too_while_a_cut_is_under_way(running: RunningService, model: nn.Module) -> None:
    with DeltaSync(model, SyncOptions(service=running.grpc, model="clicks", publish_every=1)) as sync:
        backward(model)
        sync.step()
        backward(model)
        head = sync.close()
    assert_published(running, head, model)


def closed(sync: DeltaSync) -> None:
    sync.close(WAIT)


def failed(sync: DeltaSync) -> None:
    with suppress(RuntimeError), sync:
        raise RuntimeError


@pytest.mark.parametrize(("end", "finished"), [(closed, True), (DeltaSync.abort, False), (failed, False)])
def test_only_a_closed_trainer_signs_off_as_finished(
    running: RunningService, end: Callable[[DeltaSync], None], finished: bool
) -> None:
    sync = DeltaSync(nn.Linear(2, 3), SyncOptions(service=running.grpc, model="clicks"))
    sync.flush(WAIT)
    end(sync)
    (rank,) = wait_for(lambda: [each for each in running.get_json("/trainers") if not each["connected"]])
    assert rank["finished"] is finished
