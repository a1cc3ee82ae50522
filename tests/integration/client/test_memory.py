"""A replica takes the memory of its tables, and not that of the release that brought them."""

import sys

import numpy as np
from tests.support.fleet import Trainer
from tests.support.programs import run_program
from tests.support.server import RunningService

from deltasync.client import TableSpec

LARGE = TableSpec("large", 800_000, 64)  # 205 MB; what the library itself imports and compiles takes 130 MB.

_REPLICA = """
import os, sys, time
from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before, target = resident(), NumpyTarget()
with Subscriber(SubscriberOptions(service=sys.argv[1], consumer="predictors", replica="a"), target) as replica:
    replica.wait_for(1, 60)
    replica.wait_until_ready(60)
    deadline = time.monotonic() + 20
    while (resident() - before) / target.tables["large"].nbytes > 2:
        assert time.monotonic() < deadline, (resident() - before) / target.tables["large"].nbytes
        time.sleep(0.05)
"""


def test_memory_of_a_large_release_is_given_back(running: RunningService) -> None:
    with Trainer(running.grpc, [LARGE]) as trainer:
        trainer.rows["large"] = np.ones((LARGE.rows, LARGE.dim), np.float32)
        trainer.publish_all()
    done = run_program(sys.executable, "-c", _REPLICA, running.grpc)
    assert done.returncode == 0, done.stderr
