"""Managing consumers, over HTTP and by the command line, and what operators see."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.support.command import deltasync
from tests.support.fleet import admin_of
from tests.support.metrics import (
    CHECKPOINT_METRICS,
    EVENT_METRICS,
    LATER_METRICS,
    METRICS,
    POLICY_METRICS,
    TLS_METRICS,
    samples_of,
)
from tests.support.server import TOKEN, RunningService
from tests.support.wire import TABLES, WHOLE, RankStream, ReplicaStream, ack, full_part, part, random_rows, size_of

from deltasync.client import Admin, Contradiction, DeltasyncError, Endpoint, InvalidInput, NotFound, NotPermitted
from deltasync.core.policy import Policy

UNITS = ("versions", "rows", "bytes", "seconds")
SERVICES = {f"deltasync.v1.{name}Service" for name in ("Publish", "Subscribe")}


def names(service: RunningService) -> list[str]:
    return [each["consumer"] for each in Admin(service.http).consumers()]


def test_changes_need_the_token(running: RunningService) -> None:
    changes: list[Callable[[Admin], object]] = [
        lambda admin: admin.create_consumer("new", "clicks", Policy()),
        lambda admin: admin.update_consumer("probes", Policy(top_k=2)),
        lambda admin: admin.delete_consumer("probes"),
    ]
    for token in ("", "wrong"):
        for change in changes:
            with pytest.raises(NotPermitted) as refused:
                change(Admin(Endpoint(running.http, token)))
            assert str(refused.value) == "no valid token or certificate: role admin is required"
    assert names(running) == ["predictors", "probes"]


@pytest.mark.parametrize("admin_token", [None, ""])
def test_a_service_without_a_token_takes_no_changes(tmp_path: Path, admin_token: str | None) -> None:
    with RunningService(tmp_path / "data", admin_token=admin_token) as service:
        for token in ("", "None", "secret"):
            with pytest.raises(NotPermitted, match="role admin is required"):
                Admin(Endpoint(service.http, token)).create_consumer("new", "clicks", Policy())
        assert names(service) == ["predictors", "probes"]


def test_consumers_are_made_listed_and_deleted(running: RunningService) -> None:
    admin = admin_of(running)
    made = admin.create_consumer("a-new.one", "clicks", Policy())
    assert (made["consumer"], made["model"]) == ("a-new.one", "clicks")
    assert admin.create_consumer("a-new.one", "clicks", Policy()) == made == admin.consumer("a-new.one")
    assert names(running) == ["a-new.one", "predictors", "probes"]
    admin.delete_consumer("a-new.one")
    assert names(running) == ["predictors", "probes"]


def test_only_an_update_changes_the_policy_of_a_consumer_that_is_there(running: RunningService) -> None:
    admin = admin_of(running)
    with pytest.raises(Contradiction, match="exists with another policy: update it instead"):
        admin.create_consumer("probes", "clicks", Policy(top_k=3))
    assert admin.consumer("probes")["policy"] == Policy().as_dict()
    assert admin.update_consumer("probes", Policy(top_k=3))["policy"]["top_k"] == 3
    with pytest.raises(NotFound, match="consumers: predictors, probes"):
        admin.update_consumer("no", Policy())
    assert names(running) == ["predictors", "probes"]


BAD_CHANGES: list[tuple[Callable[[Admin], object], type[DeltasyncError], str]] = [
    (lambda admin: admin.create_consumer("a/b", "clicks", Policy()), InvalidInput, "consumer name 'a/b'"),
    (lambda admin: admin.create_consumer("a", "m/n", Policy()), InvalidInput, "model name 'm/n'"),
    (lambda admin: admin.create_consumer("", "", Policy()), InvalidInput, "consumer name ''"),
    (
        lambda admin: admin.create_consumer("probes", "other", Policy()),
        Contradiction,
        "exists for model 'clicks': delete it first",
    ),
    (lambda admin: admin.delete_consumer("no"), NotFound, "consumers: predictors, probes"),
    (lambda admin: admin.delete_consumer("a/b"), NotFound, "no consumer 'a/b'; consumers: predictors, probes"),
    (lambda admin: admin.delete_table("clicks", "a table/of any name?"), NotFound, "no model 'clicks'"),
    (lambda admin: admin.delete_table("clicks", "\ud800"), InvalidInput, "it has a lone surrogate"),
    (lambda admin: admin.follow_version("probes", "9" * 4299), NotFound, "no model 'clicks'"),
    (
        lambda admin: admin.follow_consumer("probes", "predictors", 10**400),
        InvalidInput,
        "behind_seconds: Input should be a valid number",
    ),
    (lambda admin: admin.move_model("clicks", "elsewhere"), NotFound, "no model 'clicks'"),
    (lambda admin: admin.make_checkpoint("clicks"), NotFound, "no model 'clicks'"),
    (lambda admin: admin.drain_process(), Contradiction, "no other process can take the models"),
    (lambda admin: admin.drain_process("elsewhere"), NotFound, "no process 'elsewhere'"),
    (lambda admin: admin.verify_replica("probes", "r"), NotFound, "consumer 'probes' has no replica 'r'"),
]


@pytest.mark.parametrize(("change", "error", "said"), BAD_CHANGES)
def test_bad_changes_change_nothing(
    running: RunningService, change: Callable[[Admin], object], error: type[DeltasyncError], said: str
) -> None:
    with pytest.raises(error) as refused:
        change(admin_of(running))
    assert said in str(refused.value)
    assert names(running) == ["predictors", "probes"]


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("POST", "/consumers", {}, "body.name: Field required"),
        ("POST", "/consumers", {"name": "c"}, "body.model: Field required"),
        ("POST", "/consumers", {"name": "c", "model": "m", "policy": []}, "policy: expected an object"),
        ("POST", "/consumers", {"name": "c", "model": "m", "by": "me"}, "body.by: Extra inputs"),
        ("PUT", "/consumers/probes/policy", {"top": 3}, "policy: unknown key 'top'"),
        ("PUT", "/consumers/probes/policy", {"top_k": 1.5}, "top_k 1.5: expected"),
        ("PUT", "/consumers/probes/policy", None, "body: Field required"),
        ("PUT", "/consumers/probes/pause", [], "body: "),
        ("PUT", "/consumers/probes/pause", {"reason": 1}, "reason"),
        ("PUT", "/consumers/probes/pause", {"why": ""}, "body.why: Extra inputs"),
        ("POST", "/backup", {}, "body.url: Field required"),
        ("POST", "/drain", {"process": 1}, "body.process: Input should be a valid string"),
        ("POST", "/models/clicks/move", {}, "body.process: Field required"),
    ],
)
def test_bodies_that_describe_nothing_are_refused(
    running: RunningService, method: str, path: str, body: object, said: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        Endpoint(running.http, TOKEN).ask(method, path, body)
    assert said in str(refused.value)


@pytest.mark.parametrize("running", [{"progress_seconds": 1000.0}], indirect=True, ids=["idle"])
@pytest.mark.parametrize("published", [False, True])
def test_deleting_a_consumer_disconnects_its_replicas_at_once(running: RunningService, published: bool) -> None:
    with RankStream(running.grpc) as rank, ReplicaStream(running.grpc, consumer="probes") as replica:
        if published:
            rank.opened()
            rank.send(*full_part(1, random_rows(0), WHOLE))
            replica.release()
        else:
            replica.until("progress", "opened")
        admin_of(running).delete_consumer("probes")
        assert replica.refusal() == (grpc.StatusCode.NOT_FOUND, "consumer 'probes' was deleted")
    assert running.get("/consumers/probes")[0] == 404


def test_a_consumer_made_anew_knows_nothing_of_its_predecessor(tmp_path: Path) -> None:
    """Nor after a restart."""
    with RunningService(tmp_path / "data") as service:
        with RankStream(service.grpc) as rank, ReplicaStream(service.grpc, consumer="probes") as replica:
            position = rank.publish_all()
            rows, _ = replica.release()
            replica.send(ack(size_of(rows), position))
            replica.end()
            replica.refusal()
        assert service.get_json("/consumers/probes")["offset"] == 1
        admin_of(service).delete_consumer("probes")
        admin_of(service).create_consumer("probes", "clicks", Policy())
        assert service.get_json("/consumers/probes")["replicas"] == []
    with RunningService(tmp_path / "data") as service:
        assert service.get_json("/consumers/probes")["replicas"] == []


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
        rank.publish_all()
        rows, _ = replica.release()
        rank.send(*part(2, [(0, [1, 2], random_rows(1)[0][:2])]))
        position = rank.sealed()
        more, _ = replica.release()
        replica.send(ack(size_of([*rows, *more])))
        samples = samples_of(running)
        absent = POLICY_METRICS.keys() | EVENT_METRICS.keys() | TLS_METRICS.keys() | CHECKPOINT_METRICS.keys()
        assert {name for name, _ in samples} | LATER_METRICS.keys() == METRICS.keys() - absent
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


def test_the_command_line_says_what_is_wrong(running: RunningService) -> None:
    code, _, said = deltasync("lag", "nobody", "--service", running.http)
    assert (code, said) == (1, "Error: no consumer 'nobody'; consumers: predictors, probes\n")
    for wrong, hint in (
        (
            ("--service", "http://127.0.0.1:1"),
            "nothing listens there: is the service running, and is this its address?",
        ),
        (
            ("--service", f"http://{running.grpc}"),
            "perhaps this is a gRPC port: use the service's HTTP address",
        ),
    ):
        code, _, said = deltasync("lag", "predictors", *wrong)
        assert (code, hint in said, said.count("\n")) == (1, True, 1), said
    assert deltasync("lag", "predictors", "--service", running.grpc)[0] == 2
    code, _, said = deltasync("consumers", "list", "--service", "http://127.0.0.1:1")
    assert code == 1
    assert "Error: http://127.0.0.1:1" in said
