"""Brokers that let in whom they know alone."""

from pathlib import Path

import pytest
from tests.support.brokers import Brokers

from deltasync.core.errors import StorageFailed
from deltasync.core.owner import Owner
from deltasync.storage.brokers import BrokerOptions
from deltasync.storage.jetstream_logs import JetStreamLogs

USERS = 'authorization { users: [{user: "deltasync", password: "s3cret"}] }'


def options(brokers: Brokers, secret: str) -> BrokerOptions:
    urls = tuple(url.replace("nats://", f"nats://deltasync:{secret}@") for url in brokers.urls)
    return BrokerOptions(urls=urls, replicas=1, monitors=brokers.monitors)


def test_who_shows_the_password_has_a_log_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Brokers(tmp_path, settings=USERS) as brokers:
        logs = JetStreamLogs(options(brokers, "s3cret"), "a")
        log = logs.open("clicks", Owner("a", "", ""))
        log.append("cuts/clicks", 1, 0, 0, b"rows").result()
        assert [bytes(each.payload) for each in log.read("cuts/clicks")] == [b"rows"]
        logs.close()
        with pytest.raises(StorageFailed, match=r"no broker of .* can be used") as refused:
            JetStreamLogs(options(brokers, "wr0ng"), "b")
    assert "wr0ng" not in str(refused.value)
    assert "s3cret" not in caplog.text
    assert "wr0ng" not in caplog.text
