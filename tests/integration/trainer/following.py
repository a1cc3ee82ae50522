"""A trainer of the tests of this folder, and replicas that follow one."""

import re
from typing import Any, NoReturn

import numpy as np
import torch
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from torch import nn

from deltasync.client import Endpoint, NumpyTarget, Subscriber, SubscriberOptions
from deltasync.trainer.sync import DeltaSync, SyncOptions

WAIT = 30.0


class Trainer:
    """Changes one row with each step."""

    def __init__(self, service: str | Endpoint, weights: Any = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        if weights:
            self.model.load_state_dict(weights)
        self.sync = DeltaSync(self.model, SyncOptions(service=service, model="clicks", publish_every=1, **options))

    @property
    def weight(self) -> torch.Tensor:
        weight: torch.Tensor = self.model[0].weight.data
        return weight

    def step(self) -> None:
        self.weight[3] += 1
        self.sync.step()

    def step_until(self, said: str) -> None:
        """Until that is the trouble; "" is none."""
        while said not in self.sync.trouble if said else self.sync.trouble:
            self.step()

    def step_for_ever(self) -> NoReturn:
        while True:
            self.step()

    def step_until_refused(self) -> None:
        """Until something is, for the first time."""
        while not self.sync.stats.refusals:
            self.step()


def subscriber(service: ServiceProcess | RunningService, target: NumpyTarget) -> Subscriber:
    return Subscriber(SubscriberOptions(service=service.grpc, consumer="predictors", replica="p0"), target)


def assert_equal(target: NumpyTarget, model: nn.Module) -> None:
    """Every tensor of a model is held bit by bit."""
    with target.reading() as reading:
        tables = reading.tables
        for name, tensor in model.state_dict().items():
            rows = tables[name] if name in tables else tables[name.removesuffix(".weight")]  # Of an embedding.
            np.testing.assert_array_equal(rows, tensor.numpy().reshape(rows.shape), err_msg=name, strict=True)


def expect(service: ServiceProcess | RunningService, sync: DeltaSync, model: nn.Module) -> NumpyTarget:
    """What a new replica is given once all is published: what the model holds."""
    target = NumpyTarget()
    with subscriber(service, target) as replica:
        replica.wait_for(sync.flush(WAIT), WAIT)
    assert_equal(target, model)
    return target


def published_rows(service: ServiceProcess) -> int:
    (rows,) = re.findall(r'deltasync_published_rows_total\{model="clicks"\} (\S+)', service.get("/metrics")[1])
    return int(float(rows))
