"""What operators are told of everything: over HTTP, as a list and as it happens."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.fleet import ITEM, USER, Trainer, admin_of, follow, wait_until_in_sync
from tests.support.http import routes
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for

from deltasync.access.rights import need_of_request
from deltasync.base.events import RecentEvents
from deltasync.base.process import built_commit
from deltasync.checkpoints import manifest
from deltasync.client import NumpyTarget, TableSpec
from deltasync.core.cut_times import SERVICE_PARTS
from deltasync.core.policy import Policy
from deltasync.log import records
from deltasync.wire.errors import PROTOCOL

PARTS = {*SERVICE_PARTS, "release", "ack"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data") as service:
        yield service


@contextmanager
def stream(service: RunningService, path: str, **headers: str) -> Iterator[HTTPResponse]:
    request = urllib.request.Request(service.http + path, headers={"Accept": "text/event-stream", **headers})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer


def messages(answer: HTTPResponse) -> Iterator[tuple[dict[str, str], Any]]:
    """The fields and the data of each event, without the comments."""
    fields = dict[str, str]()
    for line in answer:
        name, colon, value = line.decode().rstrip("\n").partition(": ")
        if name and colon:
            fields[name] = value
        elif not name and "data" in fields:
            yield fields, json.loads(fields["data"])
            fields = {}


def test_a_version_says_where_its_time_went(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "p", NumpyTarget()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        for _ in range(2):
            sealed = trainer.publish_all()
        wait_until_in_sync(service, "predictors", sealed)
        lines = service.get_json("/versions?model=clicks&last=2")
    assert [line["version"] for line in lines] == [3, 2]
    newest = lines[0]
    assert set(newest["seconds"]) == PARTS
    assert all(seconds is not None and seconds >= 0 for seconds in newest["seconds"].values()), newest
    assert [(each["consumer"], each["replicas"]) for each in newest["consumers"]] == [("predictors", 1)]
    assert newest["rows"] == USER.rows + ITEM.rows


def test_a_version_that_no_replica_has_yet_has_no_release(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        (line,) = service.get_json("/versions")
    assert (line["seconds"]["release"], line["seconds"]["ack"], line["consumers"]) == (None, None, [])
    assert service.get("/versions?model=nobody")[0] == 404
    status, body = service.get("/versions?last=0")
    assert (status, json.loads(body)["error"]) == (400, "InvalidInput")


def test_the_lag_of_a_consumer_is_its_status(service: RunningService) -> None:
    status, lag = (service.get_json(f"/consumers/predictors{path}") for path in ("", "/lag"))
    assert lag.keys() == status.keys()
    assert {"state", "reason", "lag"} <= lag.keys()


def test_everything_is_on_one_screen(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "p", NumpyTarget()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        wait_until_in_sync(service, "predictors", trainer.publish_all())  # While the replica is there.
        found = service.get_json("/status")
        (lag,) = (each for each in service.get_json("/consumers") if each["consumer"] == "predictors")
    assert found["processes"][0]["ready"]
    assert {each["check"] for each in found["processes"][0]["checks"]} >= {"running", "models", "volumes", "log"}
    (model,) = found["models"]
    assert (model["model"], model["head"], model["connected"], model["ranks"]) == ("clicks", 2, 1, 1)
    by_name = {each["consumer"]: each for each in found["consumers"]}
    assert (by_name["predictors"]["state"], by_name["probes"]["state"]) == ("in sync", "empty")
    assert (lag["state"], lag["lag"]["versions"], lag["connected"]) == ("in sync", 0, 1)
    assert lag["freshness"]["count"] in (1, 2)  # The first is one if it was sealed after the replica had come.
    assert [each["version"] for each in found["cuts"]] == [2, 1]
    assert {each["event"] for each in found["events"]} >= {"rank_joined", "replica_joined", "consumer_changed"}


def test_one_consumer_and_one_table_have_a_route_of_their_own(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "p", NumpyTarget()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        assert service.get_json("/consumers/predictors")["connected"] == 1
        (table,) = service.get_json("/tables/item")
        (rank,) = service.get_json("/trainers")
    assert (table["model"], table["rows"], table["kind"]) == ("clicks", ITEM.rows, "embedding")
    assert {each["consumer"] for each in table["consumers"]} == {"predictors", "probes"}
    assert (rank["model"], rank["rank"], rank["ranks"], rank["connected"]) == ("clicks", 0, 1, True)
    for nothing in ("/tables/nothing", "/tables/no/thing", "/tables/..%2Fitem"):
        assert service.get(nothing)[0] == 404
    assert service.get("/consumers/nobody")[0] == 404


def test_a_table_may_have_any_name(service: RunningService) -> None:
    names = ["towers/user", "a\nb", "é %2F?#;+", "..", "lag"]
    with Trainer(service.grpc, [TableSpec(name, 4, 2) for name in names]) as trainer:
        trainer.publish_all()
        for path, name in [("towers/user", names[0]), *((quote(name, safe=""), name) for name in names)]:
            (found,) = service.get_json(f"/tables/{path}")
            assert found["table"] == name
    wait_for(lambda: not service.get_json("/trainers")[0]["connected"])
    for name in names[:-1]:
        admin_of(service).delete_table("clicks", name)
    assert [each["table"] for each in service.get_json("/tables")] == names[-1:]


def test_a_name_that_there_is_not_is_named(running: RunningService) -> None:
    for name in ("a/b", "a\nb", "a%2Fb", "é"):
        for method, route, said in (
            ("GET", "/consumers/{}", "no consumer"),
            ("GET", "/consumers/{}", "no consumer"),
            ("GET", "/consumers/{}/history", "no consumer"),
            ("PUT", "/consumers/{}/pause", "no consumer"),
            ("DELETE", "/consumers/predictors/replicas/{}", "no replica"),
            ("DELETE", "/models/{}", "no model"),
            ("GET", "/tables/{}", "no table"),
        ):
            status, body = running.request(method, route.format(quote(name, safe="")), TOKEN)
            answer = json.loads(body)
            assert (status, answer["error"]) == (404, "NotFound"), route
            assert answer["message"].startswith(f"{said} {name!r}")


def test_a_query_parameter_that_a_route_lacks_is_refused(running: RunningService) -> None:
    for method, route in routes():
        path = route.format(name="nobody", replica="r", table="t", version="1")
        status, body = running.request(method, f"{path}?nonsense=1&last=2", TOKEN)
        if need_of_request(method, path).role is None:
            assert status != 400, "monitors add parameters to probes, and links to pages"
            continue
        answer = json.loads(body)
        history = "/consumers/{name}/history"
        queries = {"/versions": "last, model", "/events": "last", history: "from_ns, last, since_seconds"}
        takes = queries.get(route, "none")
        unknown = "nonsense" if "last" in takes else "last"
        said = f"unknown query parameter {unknown!r}: {method} {route} takes {takes}"
        assert (status, answer["error"], answer["message"]) == (400, "InvalidInput", said)


def test_who_watches_is_told_again_and_again_and_when_the_service_ends(service: RunningService) -> None:
    with stream(service, "/status") as answer:
        coming = messages(answer)
        fields, first = next(coming)
        assert (fields["event"], first["consumers"][0]["state"]) == ("status", "empty")
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
            while not (found := next(coming)[1])["models"]:
                pass
        assert found["models"][0]["head"] == 1
        threading.Thread(target=service.stop).start()
        assert list(coming)[5:] == []  # It ends, and soon.


def test_events_are_told_as_they_happen_and_after_the_last_one_seen(service: RunningService) -> None:
    with stream(service, "/events?last=0") as answer:
        with Trainer(service.grpc) as trainer:
            trainer.publish_all()
        fields, joined = next(messages(answer))
        assert joined["event"] == "rank_joined"
        assert (joined["subject"]["model"], joined["level"]) == ("clicks", "info")
        assert int(fields["id"]) == joined["number"]
        (_, left) = next(messages(answer))
    with stream(service, "/events", **{"Last-Event-ID": str(joined["number"])}) as answer:
        assert next(messages(answer))[1] == left
    for nonsense in ("9" * 5000, "9" * 18, "x"):  # As if none had been named.
        with stream(service, "/events", **{"Last-Event-ID": nonsense}) as answer:
            assert next(messages(answer))[1]["number"] <= joined["number"]
    listed = service.get_json("/events?last=2")
    assert listed == [joined, left]


def test_who_follows_events_too_slowly_is_told(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, *_) = service.get_json("/events")
    monkeypatch.setattr(RecentEvents, "lacks", lambda _, number: number < first["number"])
    with stream(service, "/events", **{"Last-Event-ID": "1"}) as answer:
        (fields, gap), (_, event) = islice(messages(answer), 2)
    assert (fields["event"], gap) == ("gap", {"after": 1, "before": first["number"]})
    assert event == first


def test_a_consumers_past_is_there_for_who_comes_later(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, stream(service, "/status") as answer:
        trainer.publish_all()
        coming = messages(answer)
        while next(coming)[1]["consumers"][0]["head"] != 1:
            pass
        past = service.get_json("/consumers/predictors/lag/history")
    assert past["lag"]["versions"][-1] == 1
    assert len({len(column) for column in (past["unix_ms"], past["state"], *past["lag"].values())}) == 1
    assert past["unix_ms"] == sorted(past["unix_ms"])
    assert past["lag"]["unsent_norm"][-1] is None


def test_every_check_has_a_name(service: RunningService) -> None:
    status, body = service.get("/readyz?verbose=true")
    assert status == 200
    assert "+ volumes: ok\n" in body
    assert body.count("\n") == body.count(": ok\n") == 6


def test_names_of_tables_begin_no_line_of_readiness(tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data") as service,
        Trainer(service.grpc, [TableSpec("\x1bu\nok", 4, 2)]) as trainer,
    ):
        trainer.publish_all()
    with RunningService(tmp_path / "data", policies={"unfit": Policy(tables=("x*",))}) as service:
        status, body = service.get("/readyz")
    ok, trouble, *rest = body.split("\n")
    assert (status, ok, rest) == (200, "ok", [""])
    assert r"\x1bu\nok" in trouble


def test_levels_of_the_log_change_while_it_runs(service: RunningService, caplog: pytest.LogCaptureFixture) -> None:
    def put(body: str) -> int:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(service.http + "/log-levels", body.encode(), headers, method="PUT")  # noqa: S310
        try:
            return int(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).status)
        except urllib.error.HTTPError as error:
            return error.code

    assert put('{"logger": "deltasync.events", "level": "debug"}') == 200
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
    assert service.get_json("/log-levels")["deltasync.events"] == "debug"
    assert any("cut sealed" in each.getMessage() for each in caplog.records)
    assert put('{"logger": "deltasync.events", "level": "info"}') == 200
    half = '{"logger": "deltasync.\\ud800", "level": "info"}'
    for wrong in ('{"level": "loud"}', '{"logger": "root", "level": "info"}', '{"level": 3}', "[]", half):
        assert put(wrong) == 400, wrong
    changed = [each for each in service.get_json("/events") if each["event"] == "log_level_changed"]
    assert [each["text"] for each in changed] == ["lowest level is debug", "lowest level is info"]


def test_which_deltasync_answers(service: RunningService) -> None:
    found = service.get_json("/version")
    assert found["version"]
    formats = {"protocol": PROTOCOL, "log": records.FORMAT, "checkpoint": manifest.FORMAT}
    assert found["formats"] == formats
    assert (found.get("commit", ""), "commit" in found) == (built_commit(), bool(built_commit()))
