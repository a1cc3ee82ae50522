"""One of several processes is gone: what operators look at then works all the same, and says what is not in it."""

import time
from pathlib import Path

from tests.support.cluster import Cluster
from tests.support.command import deltasync

from deltasync.cli.status import BEHIND

LISTS = (
    ["status"],
    ["lag"],
    ["events"],
    ["cuts"],
    ["consumers", "list"],
    ["tables", "list"],
    ["replicas", "list"],
)
WAIT = 60.0


def test_commands_answer_whichever_process_is_gone(tmp_path: Path) -> None:
    with Cluster(tmp_path, services=3, brokers=1) as cluster:
        trainer, (replica, _) = cluster.trainer(), cluster.replica("a")
        replica.wait_for(trainer.publish(), WAIT)
        gone = next(each for each in cluster.services if each is not cluster.owner())
        name, addresses = cluster.name_of(gone), [each.http for each in cluster.services]
        gone.kill()
        for there in cluster.services:
            if there is not gone:
                wait_until_near(there.http, name)
        for command in LISTS:  # The addresses are asked in an order that is drawn.
            code, out, err = deltasync(*command, "--service", ",".join(addresses))
            assert (code, err, bool(out)) == (0, "", True)


def wait_until_near(service: str, gone: str) -> None:
    """Until a script is told that all is well: before that, who is missing."""
    deadline = time.monotonic() + WAIT
    while True:
        code, _, err = deltasync("lag", "--max-seconds", "3600", "--service", service)
        if code == 0:
            return
        assert (code, gone in err) == (BEHIND, True), err
        assert time.monotonic() < deadline
