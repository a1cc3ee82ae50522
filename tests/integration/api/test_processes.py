"""Several processes of a service: each answers for its own models, and says who answers for the others."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import deltasync
from tests.support.local_cluster import ADMIN_TOKEN, LocalCluster, LocalProcess
from tests.support.wire import USER

from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.client import Admin, Endpoint
from deltasync.core.policy import Policy

LISTS = (*("/consumers", "/models", "/tables", f"/tables/{USER.name}", "/trainers", "/versions", "/deletes"),)
Answer = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def model(cluster: LocalCluster) -> str:
    """A model of the first process, which consumer `mobile` follows."""
    return cluster.model(cluster.processes[0], "mobile")


def ask(process: LocalProcess, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """The answer itself, even one that sends the client elsewhere: status, headers by lower-case name, body."""
    connection = http.client.HTTPConnection(process.http.removeprefix("http://"), timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named["Authorization"] = f"Bearer {ADMIN_TOKEN}"
        connection.request(method, path, json.dumps(body) if body is not None else None, named)
        with connection.getresponse() as answer:
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, json.loads(text) if "json" in found.get("content-type", "") else text
    finally:
        connection.close()


OF_A_CONSUMER = [
    ("GET", "", None),
    ("GET", "/history", None),
    ("PUT", "", {}),
    ("DELETE", "", None),
    ("PUT", "/pause", {"reason": "a test"}),
    ("DELETE", "/pause", None),
    ("DELETE", "/replicas/r%201%2F", None),
    ("PUT", "/policy", {"top_k": 3}),
    ("POST", "/replicas/r%201/verify", None),
]


@pytest.mark.parametrize(("method", "path", "body"), OF_A_CONSUMER)
def test_who_asks_for_a_consumer_is_sent_to_its_process(
    cluster: LocalCluster, model: str, method: str, path: str, body: Any
) -> None:
    owner, other = cluster.processes
    asked = {"model": model} if body == {} else body
    status, headers, answer = ask(other, method, f"/consumers/mobile{path}", asked)
    assert (status, headers["location"]) == (307, f"{owner.http}/consumers/mobile{path}")
    assert (answer["error"], "a owns it" in answer["message"]) == ("NotOwner", True)


def test_who_asks_for_a_model_is_sent_to_its_process(cluster: LocalCluster, model: str) -> None:
    owner, other = cluster.processes
    delete = {"model": model, "table": USER.name, "ids": [1]}
    for method, path, body in (
        ("GET", f"/versions?model={model}&last=3", None),
        ("DELETE", f"/models/{model}", None),
        ("DELETE", f"/models/{model}/tables/100%25%20of%C3%A9", None),
        ("POST", "/deletes", delete),
        ("POST", f"/models/{model}/checkpoint", None),
        ("POST", f"/models/{model}/move", {"process": "b"}),
        ("POST", "/drain", {"process": "a"}),
        ("POST", "/consumers", {"name": "mobile", "model": model}),
    ):
        status, headers, _ = ask(other, method, path, body)
        assert (status, headers.get("location")) == (307, owner.http + path)
    assert [line["version"] for line in ask(owner, "GET", f"/versions?model={model}")[2]] == [1]
    assert ask(owner, "POST", "/deletes", delete)[0] == 202


def test_nobody_is_sent_after_what_there_is_not(cluster: LocalCluster, model: str) -> None:
    for each in cluster.processes:
        for method, path, body in (
            ("GET", "/consumers/nobody", None),
            ("GET", "/consumers/nobody", None),
            ("PUT", "/consumers/nobody/pause", None),
            ("GET", "/versions?model=none", None),
            ("GET", "/tables/none", None),
            ("DELETE", "/models/none", None),
            ("POST", "/deletes", {"model": "none", "table": "user", "ids": [1]}),
        ):
            status, headers, answer = ask(each, method, path, body)
            assert (status, answer["error"], "location" in headers) == (404, "NotFound", False), path


def test_a_list_is_of_the_process_that_is_asked(cluster: LocalCluster, model: str) -> None:
    owner, other = cluster.processes
    named = {"consumer": "mobile", "model": model}
    for path, key in (("consumers", "consumer"), ("models", "model"), ("tables", "model")):
        assert {line[key] for line in ask(owner, "GET", f"/{path}")[2]} == {named[key]}
        assert ask(other, "GET", f"/{path}")[2] == []
    here, there = ask(owner, "GET", "/status")[2], ask(other, "GET", "/status")[2]
    assert [each["consumer"] for each in here["consumers"]] == ["mobile"]
    assert (there["models"], there["consumers"], there["trainers"]) == ([], [], [])
    assert [each["process"] for each in (*here["processes"], *there["processes"])] == ["a", "b"]
    assert (here["missing"], there["missing"]) == (["b"], ["a"])
    assert {event["process"] for event in ask(other, "GET", "/events")[2]} == {"b"}
    assert ask(owner, "GET", f"/tables/{USER.name}")[2][0]["model"] == model
    assert ask(other, "GET", f"/tables/{USER.name}")[0] == 404


def test_programs_and_commands_take_the_address_of_any_process(cluster: LocalCluster, model: str) -> None:
    for each in cluster.processes:
        admin = Admin(Endpoint(each.http, ADMIN_TOKEN))
        assert admin.consumer("mobile")["model"] == model
        assert [line["consumer"] for line in admin.consumers()] == ["mobile"]
        assert admin.update_consumer("mobile", Policy(top_k=2))["policy"]["top_k"] == 2
        assert admin.update_consumer("mobile", Policy())["policy"]["top_k"] is None
        admin.pause_consumer("mobile", "a look")
        admin.resume_consumer("mobile")
        assert admin.create_consumer("mobile", model, Policy())["consumer"] == "mobile"
        assert admin.make_checkpoint(model)["version"] == 1
        assert {line["model"] for line in admin.fsck()} == {model, ""}
        for command in (["lag"], ["status"], ["tables", "list"], ["cuts"], ["lag", "mobile"], ["checkpoints"]):
            code, out, err = deltasync(*command, "--service", each.http)
            assert (code, err, model in out) == (0, "", True), command


def test_who_drains_one_of_several_says_which(cluster: LocalCluster) -> None:
    both = ",".join(each.http for each in cluster.processes)
    with pytest.raises(InvalidInput, match="name the process to drain"):
        Admin(Endpoint(both, ADMIN_TOKEN)).drain_process()


def test_any_process_lists_all_and_what_each_owns(cluster: LocalCluster, model: str) -> None:
    for each in cluster.processes:
        lines = ask(each, "GET", "/processes")[2]
        assert [
            (line["process"], line["http"], line["grpc"], line["here"], line["alive"], line["models"])
            for line in lines
        ] == [
            (other.name, other.http, "127.0.0.1:1", other is each, True, [model] if other.name == "a" else [])
            for other in cluster.processes
        ]
        assert [line["unowned"] for line in lines] == [[], []]


def test_pages_of_the_processes_may_ask_others_and_no_other_page(cluster: LocalCluster, model: str) -> None:
    owner, other = cluster.processes
    for path in ("/status", "/consumers/nobody"):
        _, headers, _ = ask(owner, "GET", path, Origin=other.http)
        assert (headers["access-control-allow-origin"], headers["vary"]) == (other.http, "Origin")
        _, headers, _ = ask(owner, "GET", path, Origin="http://evil.example")
        assert ("access-control-allow-origin" in headers, headers["vary"]) == (False, "Origin")
        _, headers, _ = ask(owner, "GET", path)
        assert not any(name.startswith("access-control") or name == "vary" for name in headers)
    for origin in (other.http, "http://evil.example", "null"):
        for method, path in (("DELETE", "/consumers/nobody"), ("POST", "/drain")):
            status, headers, answer = ask(owner, method, path, Origin=origin)
            assert (status, answer["error"]) == (403, "NotPermitted"), "a browser may add a certificate"
            assert "access-control-allow-origin" not in headers
    assert ask(owner, "DELETE", "/consumers/nobody", Origin=owner.http)[0] == 404
    assert all("access-control-allow-credentials" not in ask(owner, "GET", each)[1] for each in ("/", "/status"))


def test_a_browser_is_told_that_pages_may_only_read_with_a_token(cluster: LocalCluster) -> None:
    owner, other = cluster.processes

    def preflight(origin: str, method: str) -> Answer:
        return ask(
            owner, "OPTIONS", "/status",
            Origin=origin, Access_Control_Request_Method=method, Access_Control_Request_Headers="authorization",
        )  # fmt: skip

    status, headers, _ = preflight(other.http, "GET")
    assert (status, headers["access-control-allow-origin"]) == (200, other.http)
    assert "Origin" in headers["vary"]
    assert headers["access-control-allow-methods"] == "GET"
    assert "Authorization" in headers["access-control-allow-headers"]
    for origin, method in (("http://evil.example", "GET"), (other.http, "PUT"), (other.http, "DELETE")):
        status, headers, _ = preflight(origin, method)
        assert status == 400
        assert method == "PUT" or method == "DELETE" or "access-control-allow-origin" not in headers


def test_the_page_may_ask_these_processes_alone(cluster: LocalCluster) -> None:
    for each in cluster.processes:
        policy = ask(each, "GET", "/")[1]["content-security-policy"]
        directives = {name: of for name, *of in (part.split() for part in policy.split(";"))}
        assert directives["connect-src"] == ["'self'", *sorted(other.http for other in cluster.processes)]
        assert directives["default-src"] == ["'self'"]


def test_where_nobody_has_a_model_any_process_says_so(tmp_path: Path) -> None:
    with LocalCluster(tmp_path) as cluster:
        owner, other = cluster.processes
        name = cluster.model(owner, "mobile")
        for each in (other, owner):  # The last one finds nobody to give it to.
            cluster.run(each.service.models.owners.drain)
        cluster.wait_until(lambda: not any(each.service.models for each in cluster.processes))
        for each in cluster.processes:
            cluster.wait_until(lambda: each.service.models.owners.owner_of(name) is None)  # noqa: B023
            for path in (f"/versions?model={name}", "/consumers/mobile", "/consumers/mobile"):
                status, headers, answer = ask(each, "GET", path)
                assert (status, "location" in headers) == (503, False)
                assert "no process owns it" in answer["message"]
            (here,) = (line for line in ask(each, "GET", "/processes")[2] if line["here"])
            assert (here["unowned"], here["draining"]) == ([name], True)
            (line,) = ask(each, "GET", "/status")[2]["models"]
            assert (line["model"], line["head"]) == (name, None)
            assert "no live process owns" in line["trouble"]
            with pytest.raises(ServiceUnavailable, match="no live process owns it"):
                Admin(Endpoint(each.http, ADMIN_TOKEN)).consumers()


def test_a_process_that_loses_its_lease_answers_nothing_and_counts_as_gone(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, lease_seconds=0.6) as cluster:
        silent, other = cluster.processes
        silent.bucket.cut = True
        cluster.wait_until(lambda: not silent.service.models.owners.confirmed)
        for path in (*LISTS, "/consumers/mobile", "/versions?model=none"):
            status, _, answer = ask(silent, "GET", path)
            assert (status, answer["error"]) == (503, "ServiceUnavailable"), path
        assert ask(silent, "GET", "/status")[0] == 200
        cluster.wait_until(lambda: bool(other.service.models.owners.gone()))
        lines = ask(other, "GET", "/processes")[2]
        assert [(line["process"], line["alive"]) for line in lines] == [("b", True), ("a", False)]
        silent.bucket.cut = False
        cluster.wait_until(lambda: not other.service.models.owners.gone())
