"""Object storage that accepts and never answers: every route answers, and every kind of consumer goes on."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, admin_of, follow
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for

from deltasync.base.errors import DeltasyncError
from deltasync.core.policy import Policy

NAMES = {
    "name": "clicks",
    "consumer": "ranked",
    "replica": "a",
    "table": "user",
    "version": "1",
    "file": "page.js",
}


@contextmanager
def accepting() -> Iterator[tuple[str, threading.Event]]:
    """A server that accepts, reads, and never answers: its URL, and an event that is set once it was asked."""
    asked, sockets = threading.Event(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

        def accept() -> None:
            while True:
                try:
                    sockets.append(listener.accept()[0])
                except OSError:
                    return
                asked.set()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in sockets:
                each.close()


@pytest.mark.nightly
def test_every_route_and_every_consumer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with accepting() as (url, asked):
        for name, value in (("ENDPOINT_URL", url), ("ACCESS_KEY_ID", "any"), ("SECRET_ACCESS_KEY", "any")):
            monkeypatch.setenv(f"AWS_{name}", value)
        policies = {"ranked": Policy(top_k=5), "fleet": Policy(), "after": Policy()}
        settings: dict[str, Any] = {"checkpoints": "s3://bucket/models", "storage_seconds": 0.5}
        with (
            RunningService(tmp_path / "data", policies=policies, **settings) as service,
            Trainer(service.grpc) as trainer,
        ):
            admin, plain, ranked, late = admin_of(service), Recorder(), Recorder(), Recorder()
            with follow(service, "predictors", "a", plain) as first, follow(service, "ranked", "a", ranked):
                trainer.publish_all()
                with pytest.raises(DeltasyncError, match="s3://bucket/models has not answered for"):
                    admin.make_checkpoint("clicks")
                assert asked.wait(WAIT)
                wait_for(lambda: "storage_silent" in service.get("/events", TOKEN)[1], "no event says so")
                admin.follow_version("fleet", "live")
                with pytest.raises(DeltasyncError, match="has not answered for"):
                    admin.follow_version("fleet", "1")
                with pytest.raises(DeltasyncError, match="has not answered for"):
                    admin.keep_version("clicks", "good")
                with pytest.raises(DeltasyncError, match="has not answered for"):
                    admin.backup("s3://bucket/backup")
                described = json.loads(service.get("/openapi.json", TOKEN)[1])["paths"]
                for path in described:
                    filled = re.sub(r"{(\w+)(:\w+)?}", lambda found: NAMES[found[1]], path)
                    if "get" in described[path]:
                        assert service.get(filled, TOKEN)[0] < 600, path  # It answers in time.
                received, head = len(ranked.releases), trainer.change(5)
                first.wait_for(head.number, WAIT)
                wait_for(lambda: len(ranked.releases) > received, "the consumer with a policy got nothing")
                with follow(service, "after", "a", late) as new:
                    new.wait_for(head.number, WAIT)
                assert late.bytes() == plain.bytes() == trainer.expected()
                assert "has not answered for" in service.get_json("/models")[0]["checkpoint"]["reason"]
