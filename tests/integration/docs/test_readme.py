"""The examples of all README files run as they are, one after the other, against a real service."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.support.command import deltasync
from tests.support.deployments import COMMAND
from tests.support.documents import DOCUMENTS, README, document
from tests.support.fleet import Trainer, as_sent
from tests.support.ports import free_ports, is_free
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.programs import killed
from tests.support.prompt import PythonPrompt
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.waiting import wait_for

from deltasync.client import (
    NumpyTarget,
    SharedReader,
    Subscriber,
    SubscriberOptions,
    TableKind,
    TableSpec,
    ValueType,
)

TRAINER = "trainer_example.py"
PROTOCOL = document("protos/README.md")
OPERATING = document("sync_service/docs/operating.md")
SECURITY, CLUSTER = document("sync_service/docs/security.md"), document("sync_service/docs/cluster.md")
VERSIONS = document("sync_service/docs/versions.md")
SHARED_MEMORY = document("sync_service/docs/shared-memory.md")
PREDICTORS, POLICIES = document("sync_service/docs/predictors.md"), document("sync_service/docs/policies.md")
# Blocks of each file, in their order.
RUN = {
    "README.md": ["serve", TRAINER, "train", "predict", "lag", "policy"],
    "sync_service/docs/predictors.md": [
        *(
            "serve",
            "publisher",
            "numpy",
            "torch",
            "consumer",
            "quantised",
            "compiled",
            "keyed",
            "redis",
            "callback",
        ),
        "ready",
    ],
    "sync_service/docs/versions.md": ["keep", "canary", "rollback"],
    "sync_service/docs/shared-memory.md": ["mirror", "shared", "functional"],
    "sync_service/docs/policies.md": ["serve", "policy", "admin"],
    "sync_service/docs/security.md": ["access", "guarded", "client", "status"],
    "sync_service/docs/cluster.md": ["broker", "processes", "publisher", "move"],
    "sync_service/docs/operating.md": [
        *(
            "deltasync.toml",
            "serve",
            "token",
            "lag",
            "pause",
            "delete",
            "checkpoint",
            "backup",
            "fsck",
        ),
    ],
    "protos/README.md": ["checksum", "replica"],
    "trainer/README.md": ["serve", "step", "tensorboard", "checkpoint", "export", "publisher"],
    "trainer/deltasync/trainer/tracking/README.md": ["tracker"],
    "trainer/deltasync/trainer/pipelines/README.md": ["serve", "model", "pipeline", "tensordicts"],
}


def test_every_example_is_run() -> None:
    named = {each.name: [block.name for block in each.blocks() if block.name] for each in DOCUMENTS}
    assert {name: blocks for name, blocks in named.items() if blocks} == RUN


class Visitor:
    """Somebody who pastes what a README file says, with the addresses of a service that has ports of its own."""

    def __init__(self, service: ServiceProcess, folder: Path) -> None:
        self.service = service
        self.folder = folder
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DELTASYNC_SERVICE": service.grpc,
            "DELTASYNC_HTTP": service.http,
        }

    def here(self, code: str) -> str:
        """A block with the service's addresses."""
        return code.replace("localhost:50051", self.service.grpc).replace(
            "http://localhost:8080", self.service.http
        )

    def shell(self, code: str) -> list[str]:
        """What each line of a shell block prints."""
        return [self._line(line) for line in self.here(code).splitlines()]

    def whole(self, code: str) -> str:
        """What a shell block prints whose lines need each other."""
        return self._line(self.here(code))

    def script(self, code: str) -> str:
        """What a block of Python prints that is run as a file."""
        (self.folder / "script.py").write_text(self.here(code))
        return self._line("python script.py")

    def _line(self, line: str) -> str:
        command = line.removeprefix("DELTASYNC_TOKEN=secret ")
        if command.startswith("deltasync ") and not re.search(r"[|;&<>$'\"\\]", command):
            # A new process takes a second to start.
            environment = self._environment | ({"DELTASYNC_TOKEN": ADMIN_TOKEN} if command != line else {})
            with chdir(self.folder), patch.dict(os.environ, environment):
                status, printed, error = deltasync(*command.split()[1:])
            assert status == 0, f"{line}\n{printed}{error}"
            return printed
        done = subprocess.run(  # noqa: S602  # as it is pasted
            line,
            shell=True,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def _arguments(code: str) -> list[str]:
    """The arguments of the `deltasync serve` line in a block, but for the folder of its data and its token."""
    words = shlex.split(code)
    assert words[:3] == [f"DELTASYNC_ADMIN_TOKEN={ADMIN_TOKEN}", "deltasync", "serve"]
    found = words[3:]
    if "--data-dir" in found:
        at = found.index("--data-dir")
        del found[at : at + 2]
    return found


def _own_ports(line: str) -> list[str]:
    """The arguments of a `deltasync serve` line, but for its ports."""
    words = _arguments(line)
    for name in ("--grpc-port", "--http-port"):
        if name in words:
            at = words.index(name)
            del words[at : at + 2]
    return words


@pytest.fixture
def visitor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Visitor]:
    """A visitor of the README file that the test names, whose service is the one it starts."""
    arguments = _arguments(request.param.block("serve"))
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        yield Visitor(service, tmp_path)


def _visits(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("visitor", [document(name)], ids=[name], indirect=True)


def needs_curl() -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")


# By day the demo has two ranks.
@pytest.mark.parametrize("lines", [1, pytest.param(2, marks=pytest.mark.nightly)])
@_visits("README.md")
def test_the_first_steps_can_be_pasted_in_their_order(visitor: Visitor, lines: int) -> None:
    needs_curl()
    with PythonPrompt(visitor.folder) as prompt:
        (visitor.folder / TRAINER).write_text(visitor.here(README.block(TRAINER)))
        for ranks, line in enumerate(README.block("train").splitlines()[:lines], 1):
            (printed,) = visitor.shell(line)
            assert printed.count("number=") == ranks
        predicted = prompt.paste(visitor.here(README.block("predict")))
        assert "number=" in predicted
        assert "tensor([" in predicted
        # The ack may still be on its way.
        table = wait_for(lambda: _table_if_in_sync(*visitor.shell(README.block("lag"))))
        assert "predictor-0" in table
    made, listed = visitor.shell(README.block("policy"))
    assert made == "consumer mobile follows model clicks: top_k=10 % of the changed rows, value_type=int8\n"
    assert listed.count("\n") == 3  # With the titles.


def _table_if_in_sync(answer: str, table: str) -> str:
    return table if '"state":"in sync"' in answer else ""


def _beginning(*names: str) -> str:
    """What blocks of the page of predictors say before they make a target: later blocks use it."""
    return "".join(PREDICTORS.block(name).partition("target = ")[0] for name in names)


@_visits("sync_service/docs/predictors.md")
def test_the_predictors_follow_what_is_published(visitor: Visitor) -> None:
    blocks = PREDICTORS.named("python")
    printed = visitor.script(
        "".join(blocks[name] for name in ("publisher", "numpy", "torch", "keyed", "callback"))
    )
    expected = ["number=1", "1 [[1. 1. 1.", "tensor([1., 1.", "(3, 64) [ True False  True]", "1 user [  0   1   2"]
    assert [each for each in expected if each in printed] == expected


_ASKED = """
from fastapi.testclient import TestClient
from predictor import app

with TestClient(app) as client:
    {wait}
    answer = client.get("/ready")
    print(answer.status_code, answer.json())
"""


@_visits("sync_service/docs/predictors.md")
def test_a_load_balancer_is_told_when_a_predictor_is_ready(visitor: Visitor) -> None:
    code = _beginning("numpy") + PREDICTORS.block("ready")
    (visitor.folder / "predictor.py").write_text(visitor.here(code))
    assert visitor.script(_ASKED.format(wait="")).startswith("503 ")
    visitor.script(PREDICTORS.block("publisher"))
    ready = visitor.script(_ASKED.format(wait="app.state.subscriber.wait_until_ready(60)"))
    assert ready.startswith("200 ")


@_visits("sync_service/docs/predictors.md")
def test_a_mirror_is_read_by_another_process(visitor: Visitor) -> None:
    visitor.script(PREDICTORS.block("publisher"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # Others use the folder of the document.
        options = ["--directory", folder, "--service", visitor.service.grpc]
        command = shlex.split(SHARED_MEMORY.block("mirror"))[1:]  # Without `deltasync`.
        with killed(subprocess.Popen([*COMMAND, *command, *options])):
            wait_for(lambda: Path(folder, "deltasync-clicks", "control").exists())
            reader = SharedReader("clicks", directory=folder)
            wait_for(lambda: reader.readiness.yes)
            there = f'SharedReader("clicks", directory={folder!r})'
            code = SHARED_MEMORY.block("shared") + SHARED_MEMORY.block("functional")
            printed = visitor.script(code.replace('SharedReader("clicks")', there))
    assert printed.startswith("1 1 ")
    assert "1.0\nTrue it has caught up" in printed
    assert "tensor([[1., 1., 1.," in printed


@_visits("sync_service/docs/policies.md")
def test_a_policy_can_be_set_in_each_of_the_ways(visitor: Visitor) -> None:
    needs_curl()
    created, updated, put = visitor.shell(POLICIES.block("policy"))
    assert created.startswith("consumer mobile follows model clicks: top_k=10 % of the changed rows")
    assert "top_k=5 % of the changed rows, value_type=int8 (was" in updated
    assert '"top_k":0.05' in put
    assert visitor.script(POLICIES.block("admin")) == "['edge', 'mobile']\n"


def test_a_service_with_tls_and_roles_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_curl()
    monkeypatch.chdir(tmp_path)  # Where the files are that the service is given.
    arguments = shlex.split(SECURITY.block("guarded"))[2:]
    service = ServiceProcess(tmp_path / "data", *arguments)
    service.grpc, service.http = "localhost:50051", "http://localhost:8080"
    visitor = Visitor(service, tmp_path)
    visitor.shell(SECURITY.block("access"))
    with service:
        grpc, http = (each.rpartition(":")[2] for each in (service.grpc, service.http))
        service.grpc, service.http = f"localhost:{grpc}", f"https://localhost:{http}"
        code = SECURITY.block("status").replace("https://localhost:8080", service.http)
        assert visitor.script(SECURITY.block("client")).startswith("connected for")
        answer, table, paused, revoked = visitor.shell(code)
    assert '"state":"empty"' in answer
    assert "consumer predictors" in table
    assert "paused" in paused
    assert revoked == "certificate trainer revoked\n"


def test_a_cluster_on_one_machine_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(CLUSTER.block("broker"))
    [port] = map(str, free_ports(1))
    broker = [str(Path(sys.executable).with_name(program)), *arguments, "--port", port]
    lines = CLUSTER.block("processes").replace("localhost:4222", f"localhost:{port}").splitlines()
    with ExitStack() as stack:
        stack.enter_context(killed(subprocess.Popen(broker, stderr=subprocess.DEVNULL)))
        wait_for(lambda: not is_free(int(port)), "the broker did not listen in time")
        services = [ServiceProcess(tmp_path / f"data-{n}", *_own_ports(line)) for n, line in enumerate(lines)]
        for each in services:
            stack.enter_context(each)
        seen = "the processes did not see each other"
        wait_for(lambda: all(len(each.get_json("/processes")) == len(lines) for each in services), seen)
        addresses = zip(("localhost:50051", "localhost:50052"), [each.grpc for each in services], strict=True)
        urls = zip(
            ("http://localhost:8080", "http://localhost:8081"), [each.http for each in services], strict=True
        )
        # A user who pastes line by line leaves the new owner time to take the model.
        taken = (
            "until deltasync processes --service http://localhost:8080 | grep -q 'sync-1.*clicks'; do :; done\n"
        )
        move = CLUSTER.block("move").replace("deltasync drain", f"{taken}deltasync drain")
        blocks = [CLUSTER.block("publisher"), f"set -e\n{move}"]
        for shown, here in [*addresses, *urls]:
            blocks = [each.replace(shown, here) for each in blocks]
        visitor = Visitor(services[0], tmp_path)
        assert "number=1" in visitor.script(blocks[0])
        printed = visitor.whole(blocks[1])
    assert "model clicks moved to process sync-1" in printed
    assert "sync-1 has handed over clicks" in printed


def test_an_operator_s_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [variable, token] = OPERATING.block("token").removeprefix("export ").strip().split("=")
    monkeypatch.setenv(variable, token)
    settings = tmp_path / "deltasync.toml"
    settings.write_text(OPERATING.block(settings.name))
    data = tmp_path / tomllib.loads(settings.read_text())["data_dir"]
    user = TableSpec("user", 10_000, 8)
    with (
        ServiceProcess(data, *_arguments(OPERATING.block("serve"))) as service,
        Trainer(service.grpc, [user]) as trainer,
        Subscriber(SubscriberOptions(service=service.grpc, consumer="predictors"), NumpyTarget()) as replica,
    ):
        trainer.publish_all()
        replica.wait_until_ready(60)
        visitor = Visitor(service, tmp_path)
        wait_for(lambda: all(each["state"] == "in sync" for each in service.get_json("/consumers")))
        everything, each, one, late = visitor.shell(OPERATING.block("lag"))
        assert "ready" in everything
        assert "in sync" in each
        assert "the only replica holds the newest version" in one
        assert "a consumer is late" not in late
        paused, resumed = visitor.shell(OPERATING.block("pause"))
        assert "is paused" in paused
        assert "is resumed" in resumed
        _, pending = visitor.shell(OPERATING.block("delete"))
        assert "clicks" in pending
        made, _, checked = visitor.shell(OPERATING.block("checkpoint"))
        assert "of model clicks is complete" in made
        assert "damaged" not in checked
        kept, listed, follows, live, shown, exported = visitor.shell(VERSIONS.block("keep"))
        assert "follows version before-launch" in follows
        assert "follows the newest version" in live
        assert "is kept as before-launch" in kept
        assert "before-launch" in listed
        assert "live" in shown
        assert "version 1 of model clicks is in clicks.safetensors: " in exported
        _, distant, objects, withdrawn, _ = visitor.shell(VERSIONS.block("canary"))
        assert "follows version 1 (before-launch) since" in distant
        assert "20 min behind consumer 'canary'" in distant
        assert "consumer canary objects" in objects
        assert "is withdrawn" in withdrawn
        back, _, released = visitor.shell(VERSIONS.block("rollback"))
        assert "version 2 has the rows of version before-launch" in back
        assert "no longer kept" in released
        backed_up, restored = visitor.shell(OPERATING.block("backup"))
        assert "is complete" in backed_up
        assert "clicks at version 2" in restored
        assert "nothing is damaged" in visitor.shell(OPERATING.block("fsck"))[0]
        settings.write_text(settings.read_text() + '[consumers.edge]\nmodel = "clicks"\ntop_k = 0.1\n')
        service.send_signal(signal.SIGHUP)
        wait_for(lambda: "edge" in {each["consumer"] for each in service.get_json("/consumers")})
    with ServiceProcess(tmp_path / "restored") as service:
        assert [each["head"] for each in service.get_json("/models") if each["model"] == "clicks"] == [2]


@pytest.mark.skipif(PROGRAM is None, reason="no redis-server or valkey-server is installed")
@_visits("sync_service/docs/predictors.md")
def test_the_store_s_example_runs(visitor: Visitor) -> None:
    (visitor.folder / "redis").mkdir()
    with RedisServer(visitor.folder / "redis") as server:
        blocks, here = PREDICTORS.named("python"), f"unix_socket_path={server.socket!r}"
        code = blocks["publisher"] + _beginning("numpy") + blocks["redis"].replace('host="localhost"', here)
        assert "1 [ True False]" in visitor.script(code)


@_visits("sync_service/docs/predictors.md")
def test_the_quantised_model_follows_a_trainer(visitor: Visitor) -> None:
    table = TableSpec("sparse.embedding_bags.user", 1000, 64)
    with Trainer(visitor.service.grpc, [table]) as trainer:
        trainer.publish_all()
        visitor.shell(PREDICTORS.block("consumer"))
        printed = visitor.script(_beginning("numpy", "torch") + PREDICTORS.block("quantised"))
    held = as_sent(table, trainer.rows[table.name][[3, 14]], ValueType.INT8_TBE)
    expected = ValueType.INT8_TBE.decode(held, table.dtype).sum(axis=0)
    [values] = re.findall(r"tensor\(\[\[(.*)\]\]\)", printed, re.DOTALL)
    # As many digits as are printed.
    assert [float(each) for each in values.split(",")] == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.nightly
@_visits("sync_service/docs/predictors.md")
def test_the_compiled_model_follows_a_trainer_of_its_dense_part(visitor: Visitor) -> None:
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler, g++")
    dense = {"over.0.weight": (32, 64), "over.0.bias": (1, 32), "over.2.weight": (1, 32), "over.2.bias": (1, 1)}
    kind = TableKind.PARAMETER
    tables = [TableSpec("user", 1000, 64), *(TableSpec(name, *shape, kind=kind) for name, shape in dense.items())]
    with Trainer(visitor.service.grpc, tables) as trainer:
        trainer.publish_all()
        user, weight, bias, last, offset = (torch.from_numpy(trainer.rows[each.name]) for each in tables)
        hidden = (user[[3, 14, 159]].mean(0) @ weight.T + bias).relu()
        expected = (hidden @ last.T + offset).item()
        printed = visitor.script(_beginning("numpy", "torch") + PREDICTORS.block("compiled"))
    [value] = re.findall(r"tensor\(\[\[(.*)\]\]\)", printed)
    # As many digits as are printed.
    assert float(value) == pytest.approx(expected, abs=1e-3)


@_visits("sync_service/docs/predictors.md")
def test_the_protocol_s_replica_takes_what_is_published(visitor: Visitor) -> None:
    visitor.script(PREDICTORS.block("publisher"))
    printed = visitor.script("".join(PROTOCOL.named("python").values()))
    assert printed == f"{1000 * (8 + 64 * 4)} bytes of rows taken\n"


# What an operator does before the trainer starts again from the file.
_EXPORT = """
import os
assert not os.system("DELTASYNC_TOKEN=secret deltasync checkpoint clicks")
assert not os.system("deltasync export clicks clicks.safetensors --at {at}")
"""


@_visits("trainer/README.md")
def test_the_examples_of_the_trainer_go_on_from_that_of_the_readme(visitor: Visitor) -> None:
    setup = README.block(TRAINER).partition("with DeltaSync(")[0]
    trainer = document("trainer/README.md")
    tracker = document("trainer/deltasync/trainer/tracking/README.md").named("python")
    pipeline = document("trainer/deltasync/trainer/pipelines/README.md")
    assert pipeline.block("serve") == trainer.block("serve")
    first, last = trainer.named("python"), pipeline.named("python")
    first["export"] = _EXPORT.format(at=visitor.service.data_dir / "checkpoints") + first["export"]
    blocks = [setup, *first.values(), *tracker.values(), *last.values(), "dist.destroy_process_group()\n"]
    printed = visitor.script("\n".join(blocks))
    assert "sparse.embedding_bags.user" in printed
    assert list(visitor.folder.glob("runs/rank-0/events.out.tfevents.*"))
    assert "number=2" in printed
    assert "40 Position(" in printed
