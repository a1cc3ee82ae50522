"""A service that is killed while releases are in files: nothing of them is left once the next one has started."""

import signal
from pathlib import Path

import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow, lost
from tests.support.process import ServiceProcess

from deltasync.client import Policy

# With files for the smallest release, also as a file system makes them that has none without a name.
KILLED = """
import os, runpy, signal, sys, tempfile
from deltasync.feeds import releases, scratch
from deltasync.views import release_draft
step = sys.argv.pop(1)
releases.RELEASES_IN_MEMORY_BYTES = release_draft._MEMORY_BYTES = 0
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "named":
    tempfile._O_TMPFILE_WORKS, unlink = False, os.unlink
    os.unlink = lambda path, **named: die() if "/models/clicks/" in str(path) else unlink(path, **named)
elif step == "sent":
    freeze = releases.freeze
    releases.freeze = lambda *arguments: (freeze(*arguments), die())
else:
    setattr(scratch, step, die)
runpy.run_module("deltasync", run_name="__main__")
"""


def entries(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name not in ("endpoints.json", "endpoints.new")}


# In this order: a process that dies as it removes a file would also do so as it removes what is left.
STEPS = (
    ("named", "all"),
    ("sent", "all"),
    ("named", "top"),
    ("sent", "top"),
    ("reserve", "all"),
    ("Mapping", "top"),
)


@pytest.mark.nightly
def test_nothing_is_left_of_releases_in_files(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, "--consumer", "all=clicks")
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin_of(service).create_consumer("top", "clicks", Policy(top_k=1000))
        with follow(service, "top", "first", Recorder()) as replica:
            replica.wait_for(1, WAIT)
        service.kill()
        before, plain = entries(tmp_path), service.program
        for step, consumer in STEPS:
            service.program = ["-c", KILLED, step]
            service.start()
            assert entries(tmp_path) == before
            with lost(follow(service, consumer, "p", Recorder())):
                assert service.process
                assert service.process.wait(WAIT) == -signal.SIGKILL
            assert bool(entries(tmp_path) - before) == (step == "named"), "the file had a name"
        service.program = plain
        service.start()
        head = trainer.change(7)
        for consumer in ("all", "top"):
            target = Recorder()
            with follow(service, consumer, "p", target) as replica:
                replica.wait_for(head, WAIT)
            assert target.bytes() == trainer.expected()
