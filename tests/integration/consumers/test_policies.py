"""Policies as operators set, change and see them: by HTTP, command line, configuration file and metrics."""

import http.client
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.command import deltasync
from tests.support.fleet import checked_ack, wait_for_lag
from tests.support.metrics import (
    CHECKPOINT_METRICS,
    EVENT_METRICS,
    LATER_METRICS,
    METRICS,
    TLS_METRICS,
    samples_of,
)
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN, RunningService
from tests.support.wire import TABLES, WHOLE, RankStream, ReplicaStream, full_part, random_rows, size_of

from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.v1 import subscribe_pb2

GOOD = {"Authorization": f"Bearer {TOKEN}"}
DEFAULT = Policy().as_dict()
TOP, PAUSE = {"top_k": 7}, {"top_k": 7, "min_interval_seconds": 1000.0}
CONSUMER = (("consumer", "top"),)


def send(
    service: RunningService, method: str, name: str, body: bytes = b"", headers: dict[str, str] = GOOD
) -> tuple[int, Any]:
    """HTTP status and JSON of the answer."""
    connection = http.client.HTTPConnection(service.http.removeprefix("http://"), timeout=10)
    connection.request(method, f"/consumers/{name}", body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def put(service: RunningService, name: str, **body: Any) -> tuple[int, Any]:
    return send(service, "PUT", name, json.dumps(body).encode())


def policies_of(service: RunningService | ServiceProcess) -> dict[str, dict[str, Any]]:
    """What differs from the default, of each consumer."""
    return {
        line["consumer"]: {key: value for key, value in line["policy"].items() if value != DEFAULT[key]}
        for line in service.get_json("/consumers")
    }


@pytest.fixture
def topped(tmp_path: Path) -> Iterator[RunningService]:
    """A service with a consumer "top" that is given seven rows at a time."""
    with RunningService(tmp_path / "data", policies={"top": Policy(top_k=7)}) as service:
        yield service


def test_a_consumer_is_made_changed_and_deleted_by_http(running: RunningService) -> None:
    made = put(running, "new", model="clicks", policy={"top_k": 0.1})
    line = {
        "consumer": "new",
        "model": "clicks",
        "state": "empty",
        "fleet": 0,
        "connected": 0,
        "paused": None,
        "follows": "",
        "objects": "",
    }
    status, found = made
    assert (status, found) == (201, found | line | {"policy": {**DEFAULT, "top_k": 0.1}})
    assert policies_of(running) == {"new": {"top_k": 0.1}, "predictors": {}, "probes": {}}
    status, found = put(running, "new", model="clicks", policy={"value_type": "int8"})
    assert (status, found) == (200, found | line | {"policy": {**DEFAULT, "value_type": "int8"}})
    assert policies_of(running)["new"] == {"value_type": "int8"}
    assert put(running, "new", model="clicks")[0] == 200
    assert policies_of(running)["new"] == {}
    status, said = put(running, "new", model="other")
    assert (status, said["error"]) == (409, "Contradiction")
    assert "exists for model 'clicks'" in said["message"]
    assert send(running, "DELETE", "new") == (204, None)
    status, said = send(running, "DELETE", "new")
    assert (status, said["error"]) == (404, "NotFound")
    assert policies_of(running).keys() == {"predictors", "probes"}


BAD_BODIES = [
    (b"", "body: Field required"),
    (b"{", "body.1: Expecting property name"),
    (b"\xff\xfe\xfa", "body"),
    (b"[" * 60_000, "error parsing the body"),
    (b"[]", "body: Input should be a valid dictionary"),
    (b"{}", "body.model: Field required"),
    (b'{"model": 1}', "body.model: Input should be a valid string"),
    (b'{"model": "m/n"}', "model name 'm/n'"),
    (b'{"model": "clicks", "polcy": {}}', "body.polcy: Extra inputs are not permitted"),
    (b'{"model": "clicks", "policy": null}', "policy: expected an object"),
    (b'{"model": "clicks", "policy": []}', "policy: expected an object"),
    (b'{"model": "clicks", "policy": {"topk": 1}}', "policy: unknown key 'topk'"),
    (b'{"model": "clicks", "policy": {"top_k": "1"}}', "top_k '1': expected a number"),
    (b'{"model": "clicks", "policy": {"top_k": NaN}}', "top_k nan: expected"),
    (b'{"model": "clicks", "policy": {"top_k": 1' + b"0" * 400 + b"}}", "top_k"),
    (b'{"model": "clicks", "policy": {"mode": {}}}', "mode {}: expected one of embeddings, ids"),
    (b'{"model": "clicks", "policy": {"tables": ["\\ud800"]}}', "tables"),
    (b'{"model": "clicks", "policy": {"max_bytes": 18446744073709551616}}', "max_bytes"),
    (b'{"model": "clicks", "policy": {"max_age_seconds": 1e300}}', "max_age_seconds"),
    (b'{"model": "clicks", "policy": {"min_interval_seconds": 1e300}}', "min_interval_seconds"),
    (
        b'{"model": "clicks", "policy": {"max_age_seconds": 1, "min_interval_seconds": 2}}',
        "max_age_seconds 1 is shorter than min_interval_seconds 2",
    ),
    (b'{"model": "clicks", "x": "' + b"x" * (2 << 20) + b'"}', "body: expected at most 2097152 bytes"),
]


@pytest.mark.parametrize("name", ["probes", "new"])
def test_bad_bodies_change_nothing_and_the_answers_say_why(running: RunningService, name: str) -> None:
    for body, said in BAD_BODIES:
        status, answer = send(running, "PUT", name, body)
        assert (status, answer["error"]) == (400, "InvalidInput"), body[:70]
        assert answer.keys() == {"error", "message"}
        assert said in answer["message"]
    assert policies_of(running) == {"predictors": {}, "probes": {}}


def test_a_body_that_ends_in_the_middle_changes_nothing(running: RunningService) -> None:
    """What the fixture looks at besides: nothing unforeseen happens in the service."""
    connection = http.client.HTTPConnection(running.http.removeprefix("http://"), timeout=10)
    connection.putrequest("PUT", "/consumers/new")
    connection.putheader("Content-Length", "30")
    connection.putheader("Authorization", GOOD["Authorization"])
    connection.endheaders(b'{"model": "clicks"}')
    connection.close()
    assert put(running, "other", model="clicks")[0] == 201
    assert policies_of(running).keys() == {"other", "predictors", "probes"}


def test_a_policy_the_tables_cannot_meet_is_refused_with_both_numbers(running: RunningService) -> None:
    with RankStream(running.grpc) as rank:
        rank.publish_all()
    status, answer = put(running, "new", model="clicks", policy={"top_k": 10, "max_bytes": 200})
    assert status == 400
    assert re.search(r"max_bytes 200 is less than the 240 bytes", answer["message"])
    assert "new" not in policies_of(running)


def test_the_command_line_sets_changes_and_shows_policies(
    running: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELTASYNC_TOKEN", TOKEN)
    at = ("--service", running.http)
    made = deltasync("consumers", "create", "new", "--model", "clicks", "--top-k", "0.1", "--tables", "*user", *at)
    assert made == (0, "consumer new follows model clicks: tables=*user, top_k=10 % of the changed rows\n", "")
    assert policies_of(running)["new"] == {"tables": ["*user"], "top_k": 0.1}
    assert [line.split(maxsplit=4) for line in deltasync("consumers", "list", *at)[1].splitlines()] == [
        [
            "consumer",
            "model",
            "state",
            "replicas",
            "policy                                        paused  follows",
        ],
        ["new", "clicks", "empty", "0/0", "tables=*user, top_k=10 % of the changed rows"],
        ["predictors", "clicks", "empty", "0/0"],
        ["probes", "clicks", "empty", "0/0"],
    ]
    code, _, said = deltasync("consumers", "create", "new", "--model", "clicks", *at)
    assert (code, said) == (1, "Error: consumer 'new' exists with another policy: update it instead\n")
    changed = deltasync("consumers", "update", "new", "--value-type", "int8", "--max-bytes", "4000", *at)
    before = "(was tables=*user, top_k=10 % of the changed rows)"
    assert changed == (0, f"policy of consumer new: max_bytes=4000, value_type=int8 {before}\n", "")
    assert policies_of(running)["new"] == {"max_bytes": 4000, "value_type": "int8"}
    said = "policy of consumer new: every changed row, in its own type (was max_bytes=4000, value_type=int8)\n"
    assert deltasync("consumers", "update", "new", *at) == (0, said, "")
    assert policies_of(running)["new"] == {}
    assert deltasync("consumers", "delete", "new", service=running.http) == (0, "consumer new deleted\n", "")
    code, _, said = deltasync("consumers", "delete", "new", *at)
    assert (code, said) == (1, "Error: no consumer 'new'; consumers: predictors, probes\n")


def test_the_command_line_says_why_a_policy_is_refused(running: RunningService) -> None:
    at = ("--service", running.http)
    code, _, said = deltasync("consumers", "update", "nobody", *at, admin_token=TOKEN)
    assert (code, said) == (1, "Error: no consumer 'nobody'; consumers: predictors, probes\n")
    code, _, said = deltasync("consumers", "update", "probes", "--top-k", "3", *at)
    assert code == 1
    assert "role admin is required" in said
    code, _, said = deltasync("consumers", "update", "probes", "--top-k", "1.5", *at)
    assert code == 2
    assert "Error: top_k 1.5: expected a whole number of rows such as 10, without a point" in said
    assert policies_of(running)["probes"] == {}


def test_the_file_gives_its_policies_at_every_start(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[consumers]\nplain = "clicks"\n[consumers.top]\nmodel = "clicks"\ntop_k = 0.1\n')
    service = ServiceProcess(tmp_path / "data", "--config", str(config))
    with service:
        assert policies_of(service) == {"plain": {}, "top": {"top_k": 0.1}}
        for name in ("plain", "top"):
            at = ("--service", service.http)
            assert deltasync("consumers", "update", name, "--top-k", "3", *at, admin_token=TOKEN)[0] == 0
        assert policies_of(service) == {"plain": {"top_k": 3}, "top": {"top_k": 3}}
        assert service.terminate() == 0
    with service:
        assert policies_of(service) == {"plain": {"top_k": 3}, "top": {"top_k": 0.1}}
        service.kill()
    config.write_text('[consumers.top]\nmodel = "clicks"\n')
    with service:
        assert policies_of(service) == {"plain": {"top_k": 3}, "top": {}}


def test_a_file_that_is_wrong_keeps_the_service_from_starting(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[consumers.top]\nmodel = "clicks"\ntop_k = 1.5\n')
    done = ServiceProcess(tmp_path / "data", "--config", str(config)).run_to_end()
    assert done.returncode == 2
    assert f"{config}: [consumers.top]: top_k 1.5: expected" in done.stderr


class Follower:
    """A replica of "top" whose acks a test sends itself."""

    def __init__(self, stream: ReplicaStream) -> None:
        self._stream = stream
        self._taken = 0

    def release(self) -> subscribe_pb2.ReleaseEnd:
        """Take the next release, and do not acknowledge it yet."""
        rows, end = self._stream.release()
        self._taken += size_of(rows)
        return end

    def acknowledge(self, end: subscribe_pb2.ReleaseEnd, checksums: Mapping[int, int] | None = None) -> None:
        """Acknowledge a release, with the right checksums unless others are said."""
        right = {each.slot: each.sum for each in end.sums}
        position = Position(end.position.history, end.position.version)
        self._stream.send(checked_ack(self._taken, position, right if checksums is None else checksums))


def publish(rank: RankStream, step: int) -> None:
    rank.send(*full_part(step, random_rows(step), WHOLE))
    rank.sealed()


@contextmanager
def released_twice(service: RunningService) -> Iterator[tuple[Follower, subscribe_pb2.ReleaseEnd]]:
    """A replica that has acknowledged what it was sent of step 1, and taken a release of step 2."""
    with RankStream(service.grpc) as rank, ReplicaStream(service.grpc, consumer="top") as replica:
        rank.opened()
        follower = Follower(replica)
        publish(rank, 1)
        follower.acknowledge(follower.release())
        publish(rank, 2)
        yield follower, follower.release()


def norms() -> list[np.ndarray]:
    """Of what changes in each row of each table from step 1 to step 2."""
    pairs = zip(random_rows(1), random_rows(2), strict=True)
    return [np.linalg.norm(new.astype(float) - old.astype(float), axis=1) for old, new in pairs]


def left_norms(taken: int) -> list[float]:
    """The same of each table once the rows that have changed most have gone out."""
    every = norms()
    smallest = np.sort(np.concatenate(every))[-taken]
    return [float(np.linalg.norm(table[table < smallest])) for table in every]


def test_metrics_and_lag_show_what_a_release_took_and_left(topped: RunningService) -> None:
    with released_twice(topped) as (follower, second):
        samples = samples_of(topped)
        assert not {name for name, labels in samples if "consumer_unsent" in name}
        assert samples["deltasync_replica_lag_rows", (*CONSUMER, ("replica", "p0"))] == 70
        assert put(topped, "top", model="clicks", policy=PAUSE)[0] == 200
        follower.acknowledge(second)
        lag = wait_for_lag(topped, "top", lambda lag: lag["offset"] == second.position.version)
        samples = samples_of(topped)
        assert (
            {name for name, _ in samples} | LATER_METRICS.keys()
            == METRICS.keys() - EVENT_METRICS.keys() - TLS_METRICS.keys() - CHECKPOINT_METRICS.keys()
        )
        shown = {
            name.removeprefix("deltasync_consumer_"): n
            for (name, labels), n in samples.items()
            if labels == CONSUMER
        }
        assert shown["release"] == lag["release"]["number"] == second.position.version
        assert (shown["release_rows"], shown["left_rows"], shown["lag_rows"]) == (7, 63, 63)
        assert shown["release_bytes"] + shown["left_bytes"] == 40 * 24 + 30 * 20
        assert shown["left_bytes"] == shown["lag_bytes"] == lag["release"]["left_bytes"]
        assert (shown["damaged_tables"], shown["damages_total"]) == (0, 0)
        assert 0 < lag["oldest_row_seconds"] <= shown["oldest_row_seconds"]
        assert shown["unsent_norm"] == lag["lag"]["unsent_norm"] == pytest.approx(math.hypot(*left_norms(7)))
        whole = math.hypot(*(float(np.linalg.norm(rows.astype(float))) for rows in random_rows(2)))
        assert shown["unsent_share"] == lag["lag"]["unsent_share"] == pytest.approx(shown["unsent_norm"] / whole)
        for table, norm, line in zip(TABLES, left_norms(7), lag["tables"], strict=True):
            labels = (*CONSUMER, ("table", table.name))
            assert samples["deltasync_consumer_table_unsent_norm", labels] == pytest.approx(norm)
            assert samples["deltasync_consumer_table_lag_rows", labels] == line["rows"]
            assert samples["deltasync_consumer_table_oldest_row_seconds", labels] >= line["oldest_row_seconds"] > 0


def test_the_command_line_shows_the_lag_of_a_consumer_with_a_policy(topped: RunningService) -> None:
    with released_twice(topped) as (follower, second):
        put(topped, "top", model="clicks", policy=PAUSE)
        follower.acknowledge(second)
        lag = wait_for_lag(topped, "top", lambda lag: lag["offset"] == second.position.version)
        code, shown, _ = deltasync("lag", "top", "--service", topped.http)
        assert code == 0
        lines = [" ".join(line.split()) for line in shown.splitlines()]
        number, left = second.position.version, lag["release"]["left_bytes"]
        assert lines[0] == "consumer top model clicks head 2 current"
        assert lines[2] == "policy top_k=7 rows, min_interval_seconds=1000"
        assert lines[3].startswith("lag 0 versions, 63 rows, ")
        assert lines[4] == f"offset {number}, counted in releases"
        assert lines[5].startswith(f"release {number} of version 2, ")
        assert lines[6] == lag["release"]["reason"]
        assert "took 7 of 70 dirty rows: top_k 7" in lines[6]
        assert lines[8].startswith(f"left 63 rows, {left} bytes, norm ")
        share = f"{100 * lag['lag']['unsent_share']:.3g} %"
        assert f"unsent norm {math.hypot(*left_norms(7)):.4g}, {share} of the tables'" in lines
        assert share in next(line for line in lines if line.startswith("p0 "))
        assert json.loads(deltasync("lag", "top", "--json", http=topped.http)[1])["release"] == {
            **lag["release"],
            "seconds_ago": pytest.approx(lag["release"]["seconds_ago"], abs=60),
        }


def test_unsent_rows_are_still_reported_after_a_restart(tmp_path: Path) -> None:
    def start() -> RunningService:
        return RunningService(tmp_path / "data", policies={"top": Policy.from_dict(PAUSE)})

    with (
        start() as service,
        RankStream(service.grpc) as rank,
        ReplicaStream(service.grpc, consumer="top") as replica,
    ):
        rank.opened()
        follower = Follower(replica)
        publish(rank, 1)
        follower.acknowledge(follower.release())
        publish(rank, 2)
        put(service, "top", model="clicks", policy=TOP)
        second = follower.release()
        put(service, "top", model="clicks", policy=PAUSE)
        follower.acknowledge(second)
        before = wait_for_lag(service, "top", lambda lag: lag["offset"] == second.position.version)
    assert before["lag"]["unsent_norm"] > 0
    with start() as service:
        after = wait_for_lag(service, "top", lambda _: True)
        assert after["offset"] == second.position.version
        assert after["release"]["left_norm"] == before["release"]["left_norm"]
        assert after["lag"]["unsent_norm"] in (None, pytest.approx(before["lag"]["unsent_norm"]))
