"""The ranks of test_exports: models are trained, kept and trained on, and begin again from the kept version.

Arguments: the addresses of a service, the folder of its checkpoints, a folder for the exports, and runs.
"""

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from tests.integration.trainer.following import WAIT
from tests.integration.trainer.model_state.models import CASES, RAW_IDS, ROWS, Case, Model, sharded
from tests.integration.trainer.model_state.replica_ranks import (
    batches,
    evaluation,
    gathered,
    give_rows,
    to_training,
    train,
)
from tests.integration.trainer.torchrec_defects.models import CPU
from tests.support.command import deltasync
from tests.support.exports import rows_of, write_export
from tests.support.ranks import leave
from torch import nn
from torchrec.distributed.sharding_plan import data_parallel
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from deltasync.base.errors import InvalidInput
from deltasync.client import Admin, Endpoint, NumpyTarget, Policy, Subscriber, SubscriberOptions
from deltasync.trainer import load_export
from deltasync.trainer.sync import DeltaSync, SyncOptions

MAPS = "sparse._managed_collision_collection._managed_collision_modules"
# The plan that publishes, and that which begins again.
RUNS = {
    "columns-to-rows": (CASES["bags-column-wise"], CASES["bags-row-wise"]),
    "table-to-copies": (CASES["bags-table-wise"], replace(CASES["bags-table-wise"], sharding=data_parallel())),
    "sorted": (CASES["raw-ids-of-bags-lru"],) * 2,
    "hashed": (CASES["hashed-ids-of-bags"],) * 2,
}


class Service:
    """The service, and what its operator does, on the first rank."""

    def __init__(self, grpc: str, http: str, checkpoints: str, exports: str) -> None:
        self.grpc, self.http, self._at, self._exports = grpc, http, checkpoints, Path(exports)
        self.admin = Admin(Endpoint(address=http, token="secret"))  # noqa: S106

    def keep(self, model: str) -> int:
        version = [self.admin.keep_version(model, "good")["version"] if dist.get_rank() == 0 else 0]
        dist.broadcast_object_list(version)
        return version[0]

    def export(self, model: str) -> Path:
        file = self._exports / model
        if dist.get_rank() == 0:
            code, _, err = deltasync("export", model, str(file), "--at", self._at, "--version", "good")
            assert code == 0, err
        dist.barrier()
        return file


def steps(sync: DeltaSync, model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, *numbers: int) -> None:
    to_training(model)
    for number in numbers:
        trained, _ = batches(case, number)
        give_rows(model, trained)
        train(model, optimizer, trained)
        sync.step()


def looked_up(model: nn.Module, case: Case) -> list[torch.Tensor]:
    """Outputs and rows of a batch, with ids that are known and others."""
    _, asked = batches(case, 3)
    with evaluation(model):
        logits, rows = model(asked)
    return [logits, *([] if rows is None else [rows.values()])]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What an export has."""
    left_out = ("_mch_counts", "_mch_last", "_current", "_output", "_hash_zch_metadata", "_hash_zch_bucket")
    return {
        key: tensor for key, tensor in gathered(model).items() if not key.rpartition(".")[2].startswith(left_out)
    }


def check_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


def restart(service: Service, name: str) -> None:
    before, after = RUNS[name]
    options = SyncOptions(service=service.grpc, model=name, publish_every=1)
    model, optimizer = sharded(before)
    sync = DeltaSync(model, options)
    steps(sync, model, optimizer, before, 0, 1, 2, 3)
    sync.flush(WAIT)
    version, step = service.keep(name), sync.stats.published_step
    kept, answers = state_of(model), looked_up(model, before)
    steps(sync, model, optimizer, before, 4, 5)
    newest = sync.close(WAIT)
    assert newest.number > version

    model, optimizer = sharded(after)
    spoil(model)
    state = load_export(model, service.export(name))
    check_same(state_of(model), kept)
    if dist.get_rank() == 0:  # Statistics of batches are those of the first rank.
        for found, expected in zip(looked_up(model, after), answers, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    else:
        looked_up(model, after)
    sync = DeltaSync(model, options)
    sync.load_state_dict([state])
    assert (state["version"], sync.tracker.steps) == (version, step)
    steps(sync, model, optimizer, after, 3)
    position = sync.flush(WAIT)
    assert position.number > newest.number
    check_replica(service, name, model, position)
    sync.abort()
    dist.barrier()


def spoil(model: nn.Module) -> None:
    """Make a model that was made like the published one another one."""
    with torch.no_grad():
        for _, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point():
                tensor.add_(1)


def check_replica(service: Service, name: str, model: nn.Module, position: Any) -> None:
    """A replica that begins now holds what the trainer's model holds."""
    whole = gathered(model)
    if dist.get_rank() > 0:
        return
    service.admin.create_consumer(name, name, Policy())
    target = NumpyTarget()
    with Subscriber(SubscriberOptions(service=service.grpc, consumer=name, replica="p"), target) as replica:
        replica.wait_for(position, WAIT)
    with target.reading() as reading:
        for key, tensor in whole.items():
            rows = reading.tables.get(key, reading.tables.get(key.removesuffix(".weight")))
            if rows is not None:
                np.testing.assert_array_equal(rows, tensor.numpy().reshape(rows.shape), err_msg=key)
        names = {key.removesuffix(".weight") for key in whole} | whole.keys()
        assert {
            each for each in reading.tables if each.rpartition(".")[2] not in ("raw_ids", "id_ranges")
        } <= names


def refuse(exports: Path) -> None:
    """What does not fit on one rank changes nothing on any."""
    model, _ = sharded(CASES["bags-row-wise"])
    before, broken = state_of(model), exports / f"rank{dist.get_rank()}"
    whole = (exports / "columns-to-rows").read_bytes()
    broken.write_bytes(whole[: -9 * dist.get_rank() or None])
    with pytest.raises(InvalidInput, match=r"rank 1: .*/rank1 cannot be read"):
        load_export(model, broken)
    other, file = sharded(CASES["sequences-row-wise"])[0], exports / "columns-to-rows"
    message = "ranks 0, 1: version .* does not fit this model: it lacks sparse.embeddings.item"
    with pytest.raises(InvalidInput, match=message):
        load_export(other, file)
    with pytest.raises(InvalidInput, match=r"seal is \d+ on rank 0, \d+ on rank 1; all ranks need the same"):
        load_export(model, exports / ("columns-to-rows", "table-to-copies")[dist.get_rank()])
    check_same(state_of(model), before)


def other_shards(exports: Path) -> None:
    """Maps of raw ids fit fewer shards, and more where each id belongs to the shard of its row."""
    case = CASES["raw-ids-of-bags-lru"]
    whole = Model(case, CPU)
    load_export(whole, exports / "sorted")
    for name, rows in load_file(exports / "sorted").items():
        if name.endswith(".raw_ids"):
            np.testing.assert_array_equal(rows_of(whole)[name], rows)
    for raw in (1, RAW_IDS - 1):
        for module in whole.modules():
            if isinstance(module, MCHManagedCollisionModule):
                module._mch_sorted_raw_ids.fill_(torch.iinfo(torch.int64).max)[0] = raw
                module._mch_remapped_ids_mapping.copy_(torch.arange(ROWS))
        file = write_export(exports / f"whole{dist.get_rank()}", whole)
        model, _ = sharded(case)
        if raw == 1:
            load_export(model, file)
            assert state_of(model)[f"{MAPS}.user._mch_sorted_raw_ids"][0] == raw
            continue
        with pytest.raises(InvalidInput, match=r"rank 0: .*1 raw id of shard 0 of 2 would not be found there"):
            load_export(model, file)


def main(grpc: str, http: str, checkpoints: str, exports: str, *runs: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    service = Service(grpc, http, checkpoints, exports)
    for name in runs:
        try:
            restart(service, name)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
    if len(runs) == len(RUNS):
        refuse(Path(exports))
        other_shards(Path(exports))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
