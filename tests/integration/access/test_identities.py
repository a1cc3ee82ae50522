"""What belongs to an identity, what is taken from one that is revoked, and what is told to whom."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.fleet import WAIT, Trainer
from tests.support.guarded import ROLES, GuardedService, command_line_of, core_limits_of, metadata_of, token_of
from tests.support.waiting import wait_for
from tests.support.wire import (
    WHOLE,
    RankStream,
    ReplicaStream,
    full_part,
    publish_open,
    random_rows,
    subscribe_open,
)

from deltasync.base.errors import NotPermitted
from deltasync.client import Endpoint, NumpyTarget, Subscriber, SubscriberOptions
from deltasync.v1 import subscribe_pb2

DENIED = grpc.StatusCode.PERMISSION_DENIED
PUBLISH, SUBSCRIBE = "/deltasync.v1.PublishService/Publish", "/deltasync.v1.SubscribeService/Subscribe"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[GuardedService]:
    with GuardedService(tmp_path) as running:
        yield running
    assert not running.lines("Traceback|XYZZY")


def test_a_token_that_is_not_known_is_found_without_the_audit(service: GuardedService) -> None:
    """By page, `curl` and command: a replica whose token was taken away, or never was one, names no consumer."""
    with following(service, "nobody") as stream:
        assert stream.refusal()[0] is DENIED
    found = list[Any]()
    while not found:  # It is noted once the stream is over, on the service's side.
        status, said = service.ask("GET", "/events", "watcher")
        assert status == 200
        found = [each for each in json.loads(said) if each["event"] == "call_refused"]
    (refused,) = found
    assert refused["subject"]["call"] == "Subscribe"
    assert refused["subject"]["address"].startswith("127.0.0.1:")
    assert (refused["level"], "role subscribe" in refused["text"]) == ("warning", True)


def publishing(service: GuardedService, name: str = "trainer", **fields: Any) -> RankStream:
    return RankStream(service.grpc, metadata=metadata_of(name), **fields)


def following(service: GuardedService, name: str = "predictor", **fields: Any) -> ReplicaStream:
    return ReplicaStream(service.grpc, metadata=metadata_of(name), **fields)


def test_what_is_revoked_ends_its_streams_and_no_others(service: GuardedService) -> None:
    with publishing(service) as rank, following(service) as replica:
        rank.receive()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        assert rank.receive().WhichOneof("message") == "sealed"
        service.write_roles({name: roles for name, roles in ROLES.items() if name != "predictor"})
        code, said = replica.refusal()
        assert (code, said.startswith("revoked: ")) == (DENIED, True), said
        rank.send(*full_part(2, random_rows(1), WHOLE))
        assert rank.receive().WhichOneof("message") == "sealed"
        service.write_roles({"trainer": ["publish:other*"]})
        assert rank.refusal()[0] is DENIED
    assert service.call(SUBSCRIBE, "predictor", subscribe_open(consumer="predictors"))[0] is DENIED
    assert service.lines("roles reloaded: 4 tokens and 0 certificates have roles")
    assert service.lines("deltasync.audit refused: role=subscribe name=predictor .*call=Subscribe: revoked")
    assert service.lines("replica left: consumer=predictors .*revoked: ")
    assert service.lines("rank left: model=clicks .*revoked: ")


def test_a_file_that_became_wrong_changes_nothing_and_is_said(service: GuardedService) -> None:
    service.write_roles({"trainer": ["rule"]})
    service.wait_for_line("roles refused: the previous roles stay in use: .*role 'rule': expected one of")
    assert service.ask("GET", "/tables", "watcher")[0] == 200
    assert "the previous roles stay in use" in service.ask("GET", "/readyz", "watcher")[1]
    assert service.ask("GET", "/readyz") == (200, "ok\n")
    service.write_roles({"watcher": ["admin"]})
    service.wait_for_line("roles reloaded: 1 token ")
    assert service.ask("GET", "/readyz", "watcher") == (200, "ok\n")


def test_a_hang_up_reads_them_again(service: GuardedService) -> None:
    service.write_roles({"new": ["read"], "new-2": ["read"]})
    service.send_signal(signal.SIGHUP)
    service.wait_for_line("roles reloaded: 2 tokens ")


def test_a_run_is_that_of_who_has_opened_it(service: GuardedService) -> None:
    with publishing(service) as rank:
        rank.receive()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        rank.receive()
        code, said = service.call(PUBLISH, "other-trainer", publish_open())
        assert (code, "belongs to another identity" in said) == (DENIED, True), said
        with publishing(service) as second:
            second.receive()
    assert service.lines("audit refused: role=publish name=other-trainer address=127.0.0.1:.* call=Publish: run ")


def test_a_run_that_is_taken_over_is_in_the_audit(service: GuardedService) -> None:
    with publishing(service, run="first", started=1) as rank:
        rank.receive()
        with publishing(service, "other-trainer", run="second", started=2) as other:
            other.receive()
            rank.send(*full_part(1, random_rows(0), WHOLE))
            assert rank.refusal()[0] is grpc.StatusCode.ABORTED
    (line,) = service.lines("audit taken over: ")
    assert "role=publish name=other-trainer address=127.0.0.1:" in line
    assert "run second takes over from run first" in line


def test_who_publishes_a_model_is_told_to_those_who_may_read(service: GuardedService) -> None:
    service.write_roles({**ROLES, "reading-trainer": ["publish", "read"]})
    service.wait_for_line("roles reloaded")
    with publishing(service, run="first", started=2) as rank:
        rank.receive()
        late, said = publish_open(run="late", started=1), "another run publishes this model"
        assert service.call(PUBLISH, "trainer", late) == (grpc.StatusCode.FAILED_PRECONDITION, said)
        assert service.call(PUBLISH, "reading-trainer", late)[1].startswith(
            f"{said}: run late began before run first"
        )


def test_a_replica_is_that_of_who_is_connected(service: GuardedService) -> None:
    service.write_roles({**ROLES, "predictor-2": ["subscribe:pred*"]})
    service.wait_for_line("roles reloaded")
    leave = subscribe_pb2.LeaveRequest(consumer="predictors", replica="r")
    with publishing(service) as rank, following(service, replica="r") as replica:
        rank.receive()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        replica.receive()
        code, said = service.call(SUBSCRIBE, "predictor-2", subscribe_open(consumer="predictors", replica="r"))
        assert (code, "connected with another identity" in said) == (grpc.StatusCode.UNAVAILABLE, True)
        assert service.call("/deltasync.v1.SubscribeService/Leave", "predictor-2", leave)[0] is DENIED
        lag = service.ask("GET", "/consumers/predictors", "watcher")[1]
        assert '"replica":"r","connected":true' in lag.replace(" ", "") or '"r"' in lag


def test_a_replica_that_is_taken_over_is_in_the_audit(service: GuardedService) -> None:
    with publishing(service) as rank:
        rank.receive()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        rank.receive()
        with following(service, bare=True) as first, following(service, bare=True) as second:
            for number, stream in enumerate((first, second)):
                opened = subscribe_open(consumer="predictors", replica="r")
                opened.open.instance = f"instance {number}"
                stream.send(opened)
                stream.receive()
            assert first.refusal()[0] is grpc.StatusCode.FAILED_PRECONDITION
    (line,) = service.lines("audit taken over: ")
    assert "role=subscribe name=predictor address=127.0.0.1:" in line
    assert "replica taken over: consumer=predictors replica=r it belonged to predictor, " in line
    assert "which is still connected" in line


def test_names_and_counts_are_told_to_those_who_may_read(service: GuardedService) -> None:
    service.write_roles({**ROLES, "any": ["subscribe"], "any-reader": ["subscribe", "read"]})
    service.wait_for_line("roles reloaded")
    wrong = subscribe_open(consumer="predictor")
    assert service.call(SUBSCRIBE, "any", wrong) == (grpc.StatusCode.NOT_FOUND, "no consumer 'predictor'")
    assert (
        service.call(SUBSCRIBE, "any-reader", wrong)[1] == "no consumer 'predictor'; consumers: others, predictors"
    )


def test_an_unheard_of_consumer_among_many_is_still_not_found(service: GuardedService) -> None:
    for number in range(60):
        body = b'{"model": "clicks"}'
        assert service.ask("PUT", f"/consumers/{'n' * 100}-{number}", "operator", body)[0] == 201
    service.write_roles({**ROLES, "any-reader": ["subscribe", "read"]})
    service.wait_for_line("roles reloaded")
    code, said = service.call(SUBSCRIBE, "any-reader", subscribe_open(consumer="predictor"))
    assert code is grpc.StatusCode.NOT_FOUND
    assert said.endswith(" ... and 52 more")
    assert len(said.encode()) < 2_000
    status, said = service.ask("GET", f"/consumers/{'%0A%22%C3%A4' * 900}", "watcher")
    assert (status, len(said.encode()) < 2_048) == (404, True)


def test_who_did_what_is_one_line(service: GuardedService) -> None:
    forged = "x\\n2026-01-01 00:00:00,000 INFO deltasync.audit done: role=admin"
    assert service.ask("PUT", "/consumers/new", "operator", b'{"model": "clicks"}')[0] == 201
    assert service.ask("DELETE", "/consumers/none%0A2026", "operator")[0] == 404
    assert service.ask("DELETE", "/models/clicks", "watcher")[0] == 403
    assert service.ask("DELETE", "/models/", "operator")[0] == 404
    assert service.ask("PUT", "/consumers/new/pause", "operator", f'{{"reason": "{forged}"}}'.encode())[0] == 400
    service.wait_for_line("audit failed: .* call=PUT ")  # Which is written once the answer has gone out.
    lines = [line.split(" deltasync.audit ")[1] for line in service.lines(" deltasync.audit ")]
    where = r"address=127\.0\.0\.1:\d+"
    for line, pattern in zip(lines, [
        rf"done: role=admin name=operator {where} call=PUT /consumers/new: consumer changed: consumer=new .*",
        rf"failed: role=admin name=operator {where} call=DELETE /consumers/none%0A2026: no consumer 'none.*",
        rf"refused: role=admin name=watcher {where} call=DELETE /models/clicks: 'watcher' has no role admin",
        rf"failed: role=admin name=operator {where} call=DELETE /models/: .*Not Found",
        rf"failed: role=admin name=operator {where} call=PUT /consumers/new/pause: .*",
    ], strict=True):  # fmt: skip
        assert re.fullmatch(pattern, line), line


def test_a_flood_of_refusals_is_counted_not_written(service: GuardedService) -> None:
    for number in range(200):
        assert service.ask("DELETE", f"/models/m{number}", "watcher")[0] == 403
    assert len(service.lines("audit refused")) == 1


def test_nothing_secret_is_where_others_look(service: GuardedService) -> None:
    service.terminate()
    service.fresh = True
    service.start()
    pid = service.pid
    assert service.ask("GET", "/metrics", "operator")[0] == 200
    assert service.ask("GET", "/tables", "stranger")[0] == 403
    for text in (command_line_of(pid), service.ask("GET", "/metrics", "watcher")[1].encode()):
        assert b"XYZZY" not in text
    assert core_limits_of(pid) == ("1", "1")


@pytest.mark.parametrize("more", [(), ("--insecure",)])
def test_others_are_let_in_only_where_somebody_says_so(tmp_path: Path, more: tuple[str, ...]) -> None:
    service = GuardedService(tmp_path, "--host", "0.0.0.0", *more)  # noqa: S104
    if not more:
        done = service.run_to_end()
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "Error: listening on 0.0.0.0 without TLS: " in done.stderr
        return
    with service:
        assert service.lines("WARNING .*listening on 0.0.0.0 without TLS: tokens and rows can be read")
        service.http = service.http.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        status, said = service.ask("GET", "/readyz")
        assert (status, said.splitlines()[0]) == (200, "ok")
        assert "listening on 0.0.0.0 without TLS" in said.splitlines()[1]


@pytest.mark.parametrize(
    ("content", "said"), [("[tokens.x]\n", "sha256"), ("x", "roles.toml: "), (None, "no such roles file")]
)
def test_a_service_does_not_start_with_roles_that_are_wrong(
    tmp_path: Path, content: str | None, said: str
) -> None:
    service = GuardedService(tmp_path)
    if content is None:
        service.roles.unlink()
    else:
        service.roles.write_text(content)
    done = service.run_to_end()
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


def test_a_file_that_all_may_read_is_said(tmp_path: Path) -> None:
    service = GuardedService(tmp_path)
    service.roles.chmod(0o644)
    with service:
        assert service.lines("WARNING .*roles.toml can be read by every user of this machine")


def test_an_admin_token_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "admin-token"
    path.write_text("\ufefffrom-a-file \r\n", "utf-8")
    service = GuardedService(tmp_path, "--admin-token-file", str(path))
    with service:
        assert service.get("/tables", "from-a-file")[0] == 200
        assert service.get("/tables", token_of("admin token"))[0] == 403
    done = GuardedService(tmp_path, "--admin-token", "x").run_to_end()
    assert (done.returncode, "No such option" in done.stderr) == (2, True)


def subscribed(service: GuardedService, token_file: Path) -> Subscriber:
    endpoint = Endpoint(service.grpc, token_file=token_file)
    return Subscriber(SubscriberOptions(service=endpoint, consumer="predictors", replica="p0"), NumpyTarget())


def test_a_replica_goes_on_with_its_new_token_once_the_old_one_is_revoked(
    service: GuardedService, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token_of("predictor"))
    with subscribed(service, token_file) as replica:
        wait_for(lambda: replica.connection.connected)
        service.write_roles({name: roles for name, roles in ROLES.items() if name != "predictor"})
        wait_for(lambda: replica.connection.last_error)
        replica.check()
        token_file.write_text(token_of("new"))
        service.write_roles({**ROLES, "new": ROLES["predictor"]})
        with Trainer(Endpoint(service.grpc, token=token_of("trainer"))) as trainer:
            replica.wait_for(trainer.publish_all(), WAIT)


def test_a_replica_that_never_had_the_right_stops(service: GuardedService, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token_of("watcher"))
    with subscribed(service, token_file) as replica, pytest.raises(NotPermitted, match="role subscribe"):
        replica.wait_for(1, WAIT)
