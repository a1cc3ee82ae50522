"""The ranks of test_replica: a model is trained, and on the first rank two replicas follow it.

Arguments: where the service answers gRPC and HTTP, and cases.
"""

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.model_state.models import (
    CASES,
    IDS,
    NUMBERS,
    RAW_IDS,
    ROWS,
    SAMPLES,
    TABLES,
    Batch,
    Case,
    Model,
    batch_of,
    sharded,
)
from tests.integration.trainer.torchrec_defects.models import CPU
from tests.support.ranks import leave
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from deltasync.client import Endpoint, Subscriber, SubscriberOptions
from deltasync.client.admin import Admin
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.policy import Policy
from deltasync.core.tables import TableKind
from deltasync.trainer.sync import DeltaSync, SyncOptions

PATIENCE_SECONDS = 60.0
# A view of its own, which sends all that has changed.
POLICIES = {"plain": Policy(), "ranked": Policy(top_k=1_000_000)}
STEPS, DRIFT, RESUMED_AFTER = 12, 25, 5


def batches(case: Case, step: int) -> tuple[Batch, Batch]:
    """What a rank trains on in a step, and is asked in evaluation after it: ids that it knows, and others."""
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    size = (len(TABLES), SAMPLES * IDS)
    if case.managed:  # From all of the range; fewer after some steps, which come the more often, and others.
        some = torch.randint(max(2, 24 >> 2 * (step // 3)), size, generator=generator)
        ids = (some * 521 + DRIFT * (step // 3)) % RAW_IDS
    else:
        ids = torch.randint(ROWS, size, generator=generator)
    others = ids.flip(1) * 7 % (3 * RAW_IDS if case.managed else ROWS)  # Beyond what is hashed to, too.
    asked = torch.where(torch.rand(size, generator=generator) < 0.5, ids, others)
    numbers = torch.randn(2, SAMPLES, NUMBERS, generator=generator)
    return batch_of(ids, numbers[0]), batch_of(asked, numbers[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    logits, _ = model(batch)
    labels = (batch.numbers[:, 0] > 0).float()
    nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    to_training(model)


def to_training(model: nn.Module) -> None:
    model.train()
    for module in hashing(model).values():
        module.eval()


def hashing(model: nn.Module) -> dict[str, Any]:
    """Modules that find the rows of raw ids by hashing, by table."""
    found = get_unwrapped_module(model).named_modules()
    return {name.rpartition(".")[2]: module for name, module in found if hasattr(module, "_hash_zch_identities")}


def give_rows(model: nn.Module, batch: Batch) -> None:
    """Give each raw id of a batch that is this rank's the row where a lookup looks first; the last one gets it."""
    for table, module in hashing(model).items():
        mine = [raw for raw in batch.ids[table].values().tolist() if raw % 2 == dist.get_rank()]
        for raw in mine:
            jagged = JaggedTensor(values=torch.tensor([raw]), lengths=torch.tensor([1]))
            held, module._hash_zch_identities.data = module._hash_zch_identities.data, _free(module)
            row = module.remap({table: jagged})[table].values() - dist.get_rank() * ROWS // 2
            module._hash_zch_identities.data = held
            held[row] = raw


def _free(module: Any) -> torch.Tensor:
    return torch.full_like(module._hash_zch_identities.data, -1)


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of all ranks as that of the whole model, on each; what ranks have copies of is the first's."""
    pieces = {key: _pieces(tensor) for key, tensor in model.state_dict().items()}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, pieces)
    state = {}
    for key in pieces:
        found = [piece for of_rank in reversed(of_all) for piece in of_rank.get(key, [])]
        size = found[0][0]
        whole = torch.empty(size, dtype=found[0][2].dtype)
        for _, offsets, piece in found:
            whole[tuple(slice(at, at + n) for at, n in zip(offsets, piece.shape, strict=True))] = piece
        state[key] = whole
    return _with_sorted_maps(state)


def _pieces(tensor: Any) -> list[tuple[tuple[int, ...], list[int], torch.Tensor]]:
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return [
            (tuple(tensor.size()), shard.metadata.shard_offsets, shard.tensor.detach().clone()) for shard in shards
        ]
    return [(tuple(tensor.shape), [0] * tensor.dim(), tensor.detach().clone())]


def _with_sorted_maps(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for key in [key for key in state if key.endswith("._mch_sorted_raw_ids")]:
        rows = key.replace("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
        order = torch.argsort(state[key], stable=True)
        state |= {key: state[key][order], rows: state[rows][order]}
    return state


def whole(case: Case) -> Model:
    torch.manual_seed(2)
    return Model(case, CPU).eval()


def lookups_of(model: Model, rows: Any) -> Any:
    """What rows hold, without asking what raw ids have them."""
    return model.sparse._embedding_module(rows)  # type: ignore[operator]


class Replica:
    """A predictor that follows."""

    def __init__(self, case: Case, service: str, consumer: str) -> None:
        self.model = whole(case)
        options = SubscriberOptions(service=service, consumer=consumer, replica="p")
        self.target = TorchTarget(self.model)
        self.subscriber = Subscriber(options, self.target)

    def check(self, reference: Model, asked: Batch, rows: Any) -> None:
        """Every bit of what a forward reads, and of its outcome, is the reference's."""
        with self.target.reading():
            expected = reference.state_dict()
            for key, tensor in self.model.state_dict().items():
                if not key.rpartition(".")[2].startswith(("_mch_", "_current", "_output")):
                    assert torch.equal(_bits(tensor), _bits(expected[key])), key
            _check_maps(self.model, reference)
            with torch.no_grad():
                logits, found = self.model(asked)
                if rows is None:
                    wanted, _ = reference(asked)
                else:
                    assert torch.equal(found.values(), rows.values()), (found.values(), rows.values())
                    wanted = reference.logits(lookups_of(reference, rows), asked.numbers)
            assert torch.equal(logits, wanted), (logits, wanted)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _check_maps(model: nn.Module, reference: nn.Module) -> None:
    others = dict(reference.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, ManagedCollisionModule):
            assert _map(module) == _map(others[name]), name


def _map(module: Any) -> dict[int, int]:
    """Row by raw id."""
    if hasattr(module, "_hash_zch_identities"):
        identities = module._hash_zch_identities.view(-1).tolist()
        return {raw: row for row, raw in enumerate(identities) if raw != -1}
    pairs = zip(module._mch_sorted_raw_ids.tolist(), module._mch_remapped_ids_mapping.tolist(), strict=True)
    return {raw: row for raw, row in pairs if raw != torch.iinfo(torch.int64).max}


def follow(name: str, service: str, http: str) -> None:
    case = CASES[name]
    model, optimizer = sharded(case)
    with ExitStack() as stack:
        replicas = [
            _replica(stack, case, name, service, http, consumer) for consumer in POLICIES if dist.get_rank() == 0
        ]
        options = SyncOptions(service=service, model=name, publish_every=1)
        sync = DeltaSync(model, options)
        sync.flush(PATIENCE_SECONDS)  # Of buffers that are still alike on all ranks.
        to_training(model)
        known = []
        for step in range(STEPS):
            trained, asked = batches(case, step)
            give_rows(model, trained)
            train(model, optimizer, trained)
            sync.step()
            if step == RESUMED_AFTER:
                sync = _resumed(sync, model, options)
            if step % 3 == 1:
                _compare(model, case, replicas, sync.flush(PATIENCE_SECONDS), asked)
                known.append(_known(model))
        assert not case.managed or any(before - after for before, after in pairwise(known)), "none was evicted"
        sync.abort()
    dist.barrier()


def _resumed(sync: DeltaSync, model: nn.Module, options: SyncOptions) -> DeltaSync:
    """Go on as from a checkpoint, which publishes what has changed since then alone."""
    sync.flush(PATIENCE_SECONDS)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, sync.state_dict())
    sync.abort()
    resumed = DeltaSync(model, options)
    resumed.load_state_dict(states)
    resumed.flush(PATIENCE_SECONDS)
    # Which rows unknown ids take may be others in a run with other options.
    kinds = [table.table.kind for table in resumed.tracker.tables]
    assert resumed.stats.rows == kinds.count(TableKind.ID_RANGES)
    return resumed


def _replica(stack: ExitStack, case: Case, name: str, service: str, http: str, consumer: str) -> Replica:
    admin = Admin(Endpoint(address=http, token="secret"))  # noqa: S106
    admin.create_consumer(f"{name}-{consumer}", name, POLICIES[consumer])
    replica = Replica(case, service, f"{name}-{consumer}")
    stack.enter_context(replica.subscriber)
    return replica


def _compare(model: nn.Module, case: Case, replicas: list[Replica], position: Any, asked: Batch) -> None:
    with evaluation(model):
        logits, rows = model(asked)
    reference = whole(case)
    reference.load_state_dict(gathered(model), strict=False)
    for replica in replicas:
        replica.subscriber.wait_for(position, PATIENCE_SECONDS)
        replica.check(reference, asked, rows)
    # Each rank has statistics of its own; those of the first are the reference's.
    if dist.get_rank() == 0:
        wanted, _ = reference(asked)
        if rows is not None:
            wanted = reference.logits(lookups_of(reference, rows), asked.numbers)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-6)


def _known(model: nn.Module) -> set[int]:
    modules = get_unwrapped_module(model).modules()
    return {raw for module in modules if isinstance(module, ManagedCollisionModule) for raw in _map(module)}


def main(service: str, http: str, *names: str) -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # A rank that hangs says where.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        try:
            follow(name, service, http)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
