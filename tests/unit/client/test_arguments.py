"""What users pass in the place of something else is named at once, with what belongs there."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from deltasync.client import (
    Admin,
    CallbackTarget,
    Endpoint,
    NumpyTarget,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)
from deltasync.client.targets.torch_compiled import CompiledModule
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.sync import DeltaSync, SyncOptions

MODEL, TABLE = nn.Linear(2, 2), TableSpec("user", 3, 2)
SHARD = Shard.whole(TABLE)
SUBSCRIBES = SubscriberOptions(service="localhost:1", consumer="c")
PUBLISHES = PublisherOptions(service="localhost:1", model="m", run="r", run_started_unix_ns=1)
SYNCS = SyncOptions(service="localhost:1", model="m")


def replace(options: Any, name: str, value: object) -> Any:
    """Options with another value of one of them."""
    return dataclasses.replace(options, **{name: value})


SUBSCRIBER, PUBLISHER = "Subscriber(options, target): ", "Publisher(options, tables, shards): "
TARGETS = (
    "expected a target: NumpyTarget(), KeyedTarget(), TorchTarget(model) for a torch module, "
    "CallbackTarget(function) for a function"
)
SYNC = "DeltaSync(model, options): "
ENDPOINT = "Endpoint(address, token): "
OF_SUBSCRIBER, A_PATH = "expected SubscriberOptions", "expected str or PathLike: the path of a .pt2 file"
A_MODULE = "expected Module: the model, not its state_dict()"


@pytest.mark.parametrize(
    ("call", "arguments", "said"),
    [
        (Subscriber, (SUBSCRIBES, MODEL), f"{SUBSCRIBER}target is of type Linear, {TARGETS}"),
        (Subscriber, (SUBSCRIBES, NumpyTarget), f"{SUBSCRIBER}target is the class NumpyTarget itself, {TARGETS}"),
        (Subscriber, (SUBSCRIBES, None), f"{SUBSCRIBER}target is None, {TARGETS}"),
        (Subscriber, (SUBSCRIBES, lambda _: None), f"{SUBSCRIBER}target is of type function, {TARGETS}"),
        (Subscriber, (NumpyTarget(), SUBSCRIBES), f"{SUBSCRIBER}options is of type NumpyTarget, {OF_SUBSCRIBER}"),
        (Subscriber, (PUBLISHES, None), f"{SUBSCRIBER}options is of type PublisherOptions, {OF_SUBSCRIBER}"),
        (Publisher, ("host:1", [TABLE], [SHARD]), f"{PUBLISHER}options is of type str, expected PublisherOptions"),
        (
            Publisher,
            (PUBLISHES, TABLE, SHARD),
            f"{PUBLISHER}tables is of type TableSpec, expected a list of TableSpec",
        ),
        (
            Publisher,
            (PUBLISHES, [SHARD], [TABLE]),
            f"{PUBLISHER}an item of tables is of type Shard, expected TableSpec",
        ),
        (
            Publisher,
            (PUBLISHES, {"user": TABLE}, []),
            f"{PUBLISHER}an item of tables is of type str, expected TableSpec",
        ),
        (
            Publisher,
            (PUBLISHES, [TABLE], [TABLE]),
            f"{PUBLISHER}an item of shards is of type TableSpec, expected Shard",
        ),
        (TorchTarget, ({},), f"TorchTarget(module): module is of type dict, {A_MODULE}"),
        (TorchTarget, (MODEL.state_dict(),), f"TorchTarget(module): module is of type OrderedDict, {A_MODULE}"),
        (TorchTarget, (nn.Linear,), f"TorchTarget(module): module is the class Linear itself, {A_MODULE}"),
        (
            CallbackTarget,
            (NumpyTarget(),),
            "CallbackTarget(callback): callback is of type NumpyTarget, expected a function",
        ),
        (CompiledModule, (MODEL,), f"CompiledModule(package): package is of type Linear, {A_PATH}"),
        (CompiledModule, (b"a.pt2",), f"CompiledModule(package): package is of type bytes, {A_PATH}"),
        (Endpoint, (("localhost", 1),), f"{ENDPOINT}address is of type tuple, expected str"),
        (Endpoint, ("localhost:1", 5), f"{ENDPOINT}token is of type int, expected str"),
        (Admin, (SUBSCRIBES,), f"{ENDPOINT}address is of type SubscriberOptions, expected str"),
        (replace, (SUBSCRIBES, "held", 5), "SubscriberOptions(...): held is of type int, expected Position"),
        (replace, (SUBSCRIBES, "consumer", None), "consumer name is None, expected str"),
        (
            replace,
            (PUBLISHES, "continues", 5),
            "PublisherOptions(...): continues is of type int, expected Position",
        ),
        (replace, (SYNCS, "model", MODEL), "model name is of type Linear, expected str"),
        (DeltaSync, (SYNCS, MODEL), f"{SYNC}model is of type SyncOptions, expected Module"),
        (DeltaSync, (MODEL, "localhost:1"), f"{SYNC}options is of type str, expected SyncOptions"),
        (
            RowBatch.of_table,
            ("user", [1], [[1, 2]]),
            "Shard.whole(table): table is of type str, expected TableSpec",
        ),
    ],
)
def test_an_argument_in_the_place_of_another_is_named(
    call: Callable[..., Any], arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}$"):
        call(*arguments)
