"""Managing consumers, by gRPC and by the command line, and what operators see."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.command import deltasync
from tests.support.metrics import EVENT_METRICS, METRICS, POLICY_METRICS, SNAPSHOT_METRICS, TLS_METRICS, samples_of
from tests.support.server import TOKEN, RunningService
from tests.support.wire import TABLES, WHOLE, RankStream, ReplicaStream, ack, full_part, part, random_rows, size_of

from deltasync.v1 import admin_pb2, admin_pb2_grpc

GOOD = (("authorization", f"Bearer {TOKEN}"),)
UNITS = ("versions", "rows", "bytes", "seconds")
SERVICES = {f"deltasync.v1.{name}Service" for name in ("Publish", "Subscribe", "Admin")}


@pytest.fixture
def admin(running: RunningService) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def create(name: str, model: str = "clicks") -> admin_pb2.CreateConsumerRequest:
    return admin_pb2.CreateConsumerRequest(consumer=admin_pb2.Consumer(name=name, model=model))


def delete(name: str) -> admin_pb2.DeleteConsumerRequest:
    return admin_pb2.DeleteConsumerRequest(name=name)


def change(admin: admin_pb2_grpc.AdminServiceStub, request: Any, metadata: Any = GOOD) -> Any:
    if isinstance(request, admin_pb2.CreateConsumerRequest):
        return admin.CreateConsumer(request, timeout=10, metadata=metadata)
    return admin.DeleteConsumer(request, timeout=10, metadata=metadata)


def names(admin: admin_pb2_grpc.AdminServiceStub) -> list[str]:
    return [each.name for each in admin.ListConsumers(admin_pb2.ListConsumersRequest(), timeout=10).consumers]


def refused(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, str]:
    assert isinstance(error.value, grpc.Call)
    return error.value.code(), error.value.details() or ""


def test_changes_need_the_token(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    wrong = [(), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),), (("authorization", ""),)]
    for metadata, request in itertools.product(wrong, (create("new"), delete("probes"))):
        with pytest.raises(grpc.RpcError) as error:
            change(admin, request, metadata)
        assert refused(error) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "no token and no certificate that the service knows: role admin is needed",
        )
    assert names(admin) == ["predictors", "probes"]


def test_a_service_without_a_token_takes_no_changes(tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data", admin_token=None) as service,
        grpc.insecure_channel(service.grpc) as channel,
    ):
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for token in ("", "None", "secret"):
            with pytest.raises(grpc.RpcError) as error:
                admin.CreateConsumer(create("new"), timeout=10, metadata=(("authorization", f"Bearer {token}"),))
            assert refused(error)[0] is grpc.StatusCode.PERMISSION_DENIED
            assert "role admin is needed" in refused(error)[1]
        assert names(admin) == ["predictors", "probes"]


def test_consumers_are_made_listed_and_deleted(
    running: RunningService, admin: admin_pb2_grpc.AdminServiceStub
) -> None:
    made = change(admin, create("a-new.one")).consumer
    assert (made.name, made.model) == ("a-new.one", "clicks")
    assert made.created.seconds > 1_600_000_000
    again = change(admin, create("a-new.one")).consumer
    assert again == made
    assert names(admin) == ["a-new.one", "predictors", "probes"]
    assert [line["consumer"] for line in running.get_json("/consumers")] == names(admin)
    change(admin, delete("a-new.one"))
    assert names(admin) == ["predictors", "probes"]


BAD_CHANGES = [
    (create("a/b"), grpc.StatusCode.INVALID_ARGUMENT, "consumer name 'a/b'"),
    (create("a", "m/n"), grpc.StatusCode.INVALID_ARGUMENT, "model name 'm/n'"),
    (admin_pb2.CreateConsumerRequest(), grpc.StatusCode.INVALID_ARGUMENT, "consumer name ''"),
    (create("probes", "other"), grpc.StatusCode.FAILED_PRECONDITION, "exists for model 'clicks': delete it first"),
    (delete("no"), grpc.StatusCode.NOT_FOUND, "consumers: predictors, probes"),
]


def test_bad_changes_change_nothing(admin: admin_pb2_grpc.AdminServiceStub) -> None:
    for request, code, said in BAD_CHANGES:
        with pytest.raises(grpc.RpcError) as error:
            change(admin, request)
        assert refused(error)[0] is code
        assert said in refused(error)[1]
    assert names(admin) == ["predictors", "probes"]


@pytest.mark.parametrize("published", [False, True])
def test_deleting_a_consumer_disconnects_its_replicas_at_once(
    running: RunningService,
    admin: admin_pb2_grpc.AdminServiceStub,
    monkeypatch: pytest.MonkeyPatch,
    published: bool,
) -> None:
    monkeypatch.setattr("deltasync.api.subscribe._PROGRESS_SECONDS", 1000)
    with RankStream(running.grpc) as rank, ReplicaStream(running.grpc, consumer="probes") as replica:
        if published:
            rank.opened()
            rank.send(*full_part(1, random_rows(0), WHOLE))
            replica.release()
        else:
            replica.until("progress", "opened")
        change(admin, delete("probes"))
        assert replica.refusal() == (grpc.StatusCode.NOT_FOUND, "consumer 'probes' was deleted")
    assert running.get("/consumers/probes/lag")[0] == 404


def test_a_consumer_made_anew_knows_nothing_of_its_predecessor(tmp_path: Path) -> None:
    """Nor after a restart."""
    with RunningService(tmp_path / "data") as service, grpc.insecure_channel(service.grpc) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        with RankStream(service.grpc) as rank, ReplicaStream(service.grpc, consumer="probes") as replica:
            rank.opened()
            rank.send(*full_part(1, random_rows(0), WHOLE))
            position = rank.sealed()
            rows, _ = replica.release()
            replica.send(ack(size_of(rows), position))
            replica.end()
            replica.refusal()
        assert service.get_json("/consumers/probes/lag")["offset"] == 1
        change(admin, delete("probes"))
        change(admin, create("probes"))
        assert service.get_json("/consumers/probes/lag")["replicas"] == []
    with RunningService(tmp_path / "data") as service:
        assert service.get_json("/consumers/probes/lag")["replicas"] == []


def test_health_and_reflection_answer(running: RunningService) -> None:
    with grpc.insecure_channel(running.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVICES):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection.ServerReflectionInfo(iter([request]), timeout=10)
        found = {service.name for service in listed.list_services_response.service}
        assert found >= SERVICES
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="deltasync.v1.PublishService")
        (described,) = reflection.ServerReflectionInfo(iter([request]), timeout=10)
        assert described.file_descriptor_response.file_descriptor_proto


def test_metrics_are_prometheus_text_with_the_names_that_were_promised(running: RunningService) -> None:
    with RankStream(running.grpc) as rank, ReplicaStream(running.grpc) as replica:
        rank.opened()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        rank.sealed()
        rows, _ = replica.release()
        rank.send(*part(2, [(0, [1, 2], random_rows(1)[0][:2])]))
        position = rank.sealed()
        more, _ = replica.release()
        replica.send(ack(size_of([*rows, *more])))
        samples = samples_of(running)
        absent = POLICY_METRICS.keys() | EVENT_METRICS.keys() | TLS_METRICS.keys() | SNAPSHOT_METRICS.keys()
        assert {name for name, _ in samples} == METRICS.keys() - absent
        consumer = (("consumer", "predictors"),)
        size = 40 * 24 + 30 * 20
        assert samples["deltasync_head_version", (("model", "clicks"),)] == position.number == 2
        assert samples["deltasync_consumer_lag_versions", consumer] == 2
        assert samples["deltasync_consumer_lag_rows", consumer] == 70
        assert samples["deltasync_consumer_lag_bytes", consumer] == size
        assert samples["deltasync_consumer_lag_seconds", consumer] > 0
        replica_lag = [samples[f"deltasync_replica_lag_{unit}", (*consumer, ("replica", "p0"))] for unit in UNITS]
        assert replica_lag[:3] == [2, 70, size]
        assert replica_lag[3] > 0
        assert [samples["deltasync_consumer_table_lag_rows", (*consumer, ("table", t.name))] for t in TABLES] == [
            40,
            30,
        ]
        assert samples["deltasync_consumer_damaged_tables", consumer] == 0
        assert samples["deltasync_consumer_damages_total", consumer] == 0
        assert samples["deltasync_consumer_replicas", (*consumer, ("state", "connected"))] == 1
        assert samples["deltasync_consumer_replicas", (*consumer, ("state", "away"))] == 0
        assert samples["deltasync_published_rows_total", (("model", "clicks"),)] == 72
        assert samples["deltasync_published_bytes_total", (("model", "clicks"),)] == size + 48
        assert samples["deltasync_released_rows_total", consumer] == 72
        assert samples["deltasync_released_bytes_total", consumer] == size + 48
        assert samples["deltasync_table_rows", (("model", "clicks"), ("table", WHOLE[0].table.name))] == 40
        assert samples["deltasync_table_bytes", (("model", "clicks"), ("table", WHOLE[0].table.name))] == 640
        assert samples["deltasync_log_bytes", ()] > size


def test_the_command_line_manages_consumers(running: RunningService) -> None:
    at = ("--service", running.grpc)
    listed = deltasync("consumers", "list", *at)[1].splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [
        ["predictors", "clicks", "empty"],
        ["probes", "clicks", "empty"],
    ]
    made = deltasync("consumers", "create", "new", "--model", "m", *at, admin_token=TOKEN)
    assert made == (0, "consumer new follows model m\n", "")
    assert deltasync("consumers", "delete", "new", admin_token=TOKEN, service=running.grpc)[:2] == (
        0,
        "consumer new deleted\n",
    )
    code, _, said = deltasync("consumers", "delete", "new", *at, admin_token=TOKEN)
    assert (code, said) == (1, "Error: no consumer 'new'; consumers: predictors, probes\n")
    code, _, said = deltasync("consumers", "delete", "probes", *at)
    assert code == 1
    assert "role admin is needed" in said


def test_the_command_line_shows_lag(running: RunningService) -> None:
    with RankStream(running.grpc) as rank, ReplicaStream(running.grpc) as replica:
        rank.opened()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        replica.release()
        code, shown, _ = deltasync("lag", "predictors", "--http", running.http)
        assert code == 0
        lines = [line.split() for line in shown.splitlines()]
        assert lines[0][:6] == ["consumer", "predictors", "model", "clicks", "head", "1"]
        assert lines[2][:5] == ["replica", "p0", "lacks", "1", "version,"]
        assert lines[4] == ["offset", "versions", "rows", "bytes", "seconds"]
        assert lines[5][:6] == ["all", "replicas", "0", "1", "70", "1560"]
        assert lines[6][:5] == ["p0", "0", "1", "70", "1560"]
        assert [line[0] for line in lines[7:]] == [shard.table.name for shard in WHOLE]
        code, shown, _ = deltasync("lag", "predictors", "--json", http=running.http)
        assert code == 0
        assert json.loads(shown)["lag"]["rows"] == 70


def test_the_command_line_says_what_is_wrong(running: RunningService) -> None:
    code, _, said = deltasync("lag", "nobody", "--http", running.http)
    assert (code, said) == (1, "Error: no consumer 'nobody'; consumers: predictors, probes\n")
    for wrong, hint in (
        (
            ("--http", "http://127.0.0.1:1"),
            "nothing listens there: is the service running, and is this its address?",
        ),
        (("--http", f"http://{running.grpc}"), "is the service running, and is this its HTTP address?"),
        (("--service", "127.0.0.1:1"), "nothing listens there: is the service running, and is this its address?"),
    ):
        code, _, said = deltasync("lag", "predictors", *wrong)
        assert (code, hint in said, said.count("\n")) == (1, True, 1), said
    assert deltasync("lag", "predictors", "--http", running.grpc)[0] == 2
    code, _, said = deltasync("consumers", "list", "--service", "127.0.0.1:1")
    assert code == 1
    assert "Error: 127.0.0.1:1" in said


def test_http_says_that_something_does_not_exist(running: RunningService) -> None:
    assert running.get("/consumers/nobody/lag")[0] == 404
    assert running.get("/nowhere")[0] == 403
    assert running.get("/nowhere", TOKEN)[0] == 404


def test_an_empty_admin_token_is_none(tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data", admin_token="") as service,
        grpc.insecure_channel(service.grpc) as channel,
    ):
        for sent in ("Bearer ", "Bearer"):
            with pytest.raises(grpc.RpcError, match="role admin is needed"):
                change(admin_pb2_grpc.AdminServiceStub(channel), create("c"), [("authorization", sent)])
