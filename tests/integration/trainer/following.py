"""Replicas that follow a trainer in the tests of this folder."""

import re

import numpy as np
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from torch import nn

from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions
from deltasync.trainer.sync import DeltaSync

WAIT = 30.0


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
