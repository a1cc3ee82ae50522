"""A stream of the brokers that an operator has edited so that it discards acknowledged writes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.cluster import MODEL, Cluster, same
from tests.support.metrics import samples_of
from tests.support.waiting import wait_for

TIMEOUT = 60
STREAM = f"deltasync_{MODEL}"
SAFE = {"max_age": 0, "max_msgs": -1, "discard": "new"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, services=1, brokers=1) as cluster:
        yield cluster


def readiness(cluster: Cluster) -> str:
    """The answer of /readyz; empty if it is 200."""
    status, body = cluster.services[0].get("/readyz")
    return "" if status == 200 else body


def test_no_cut_is_sealed_while_the_stream_could_discard_it(cluster: Cluster) -> None:
    (service,) = cluster.services
    trainer = cluster.trainer()
    trainer.publish()
    replica, target = cluster.replica("a")
    replica.wait_for(trainer.head, TIMEOUT)
    cluster.brokers.edit(STREAM, max_age=3600 * 10**9)
    said = f"stream {STREAM} could lose acknowledged writes: max_age 3600000000000: nats stream edit {STREAM} --"
    wait_for(lambda: said in readiness(cluster), lambda: readiness(cluster))
    (event,) = wait_for(lambda: [each for each in service.get_json("/events") if each["event"] == "volume_failed"])
    assert said in event["text"]
    lag = service.get_json("/consumers/predictors")
    assert said in lag["reason"]
    assert [each["connected"] for each in lag["replicas"]] == [True]
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(trainer.publish)
        wait_for(lambda: samples_of(service)["deltasync_limit_taken", (("limit", "log_queue_bytes"),)])
        assert service.get_json("/models")[0]["head"] == 1
        cluster.brokers.edit(STREAM, **SAFE)
        replica.wait_for(cut.result(TIMEOUT), TIMEOUT)
    wait_for(lambda: not readiness(cluster), lambda: readiness(cluster))
    wait_for(lambda: "volume_recovered" in {each["event"] for each in service.get_json("/events")})
    assert same(target, trainer.rows)


@pytest.mark.nightly  # It starts the service three times.
def test_a_stream_that_lost_its_beginning_is_replaced_by_a_checkpoint(cluster: Cluster) -> None:
    (service,) = cluster.services
    trainer = cluster.trainer()
    for _ in range(3):
        trainer.publish()
    replica, target = cluster.replica("a")
    replica.wait_for(trainer.head, TIMEOUT)
    cluster.brokers.edit(STREAM, max_msgs=2, discard="old")
    cluster.brokers.edit(STREAM, **SAFE)
    said = f"stream {STREAM} has lost acknowledged writes: its first messages were discarded"
    wait_for(lambda: said in readiness(cluster), lambda: readiness(cluster))
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(trainer.publish)
        assert service.terminate() == 0, "it waits for no write that is held back"
        service.start()
        wait_for(lambda: any(said in each["text"] for each in service.get_json("/events")))
        assert service.terminate() == 0
        cluster.brokers.remove(STREAM)
        service.start()
        replica.wait_for(cut.result(TIMEOUT), TIMEOUT)
    assert same(target, trainer.rows)
