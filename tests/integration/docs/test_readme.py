"""The examples of all README files run as they are, one after the other, against a real service."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.documents import DOCUMENTS, README, document
from tests.support.fleet import Trainer, as_sent
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.prompt import PythonPrompt
from tests.support.redis_server import PROGRAM, RedisServer

from deltasync.client import TableKind, TableSpec, ValueType

TRAINER = "trainer_example.py"
SERVICE, PROTOCOL = document("sync_service/README.md"), document("protos/README.md")
# Blocks of each file, in their order.
RUN = {
    "README.md": ["serve", "publish", "subscribe", TRAINER, "train", "predict", "lag", "policy"],
    "sync_service/README.md": [
        *("serve", "publisher", "numpy", "torch", "quantised", "compiled", "keyed", "redis", "callback"),
        *("policy", "admin", "access", "guarded", "status"),
    ],
    "protos/README.md": ["checksum", "replica"],
    "trainer/README.md": ["step", "scalars", "checkpoint"],
    "trainer/deltasync/trainer/tracking/README.md": ["tracker"],
    "trainer/deltasync/trainer/pipelines/README.md": ["model", "pipeline", "tensordicts"],
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

    def script(self, code: str) -> str:
        """What a block of Python prints that is run as a file."""
        (self.folder / "script.py").write_text(self.here(code))
        return self._line("python script.py")

    def _line(self, line: str) -> str:
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


@_visits("README.md")
def test_rows_are_published_and_read_at_the_prompt(visitor: Visitor) -> None:
    with PythonPrompt(visitor.folder) as prompt:
        assert "number=2" in prompt.paste(visitor.here(README.block("publish")))
        assert "[5. 5. 5. 5.]\n [1. 1. 1. 1.]" in prompt.paste(visitor.here(README.block("subscribe")))


@_visits("README.md")
def test_the_first_steps_can_be_pasted_in_their_order(visitor: Visitor) -> None:
    needs_curl()
    with PythonPrompt(visitor.folder) as prompt, PythonPrompt(visitor.folder) as other:
        prompt.paste(visitor.here(README.block("publish")))
        prompt.paste(visitor.here(README.block("subscribe")))
        (visitor.folder / TRAINER).write_text(visitor.here(README.block(TRAINER)))
        alone, ranks = visitor.shell(README.block("train"))
        assert alone.count("number=") == 1
        assert ranks.count("number=") == 2
        predicted = other.paste(visitor.here(README.block("predict")))
        assert "number=" in predicted
        assert "tensor([" in predicted
        answer, table = visitor.shell(README.block("lag"))
        assert '"state":"in sync"' in answer
        assert "predictor-0" in table
    made, listed = visitor.shell(README.block("policy"))
    assert made == "consumer mobile follows model clicks: top_k=10 % of the changed rows, value_type=int8\n"
    assert listed.count("\n") == 4  # With the titles.


@_visits("sync_service/README.md")
def test_the_service_s_examples_run(visitor: Visitor) -> None:
    needs_curl()
    blocks = SERVICE.named("python")
    printed = visitor.script(
        "".join(blocks[name] for name in ("publisher", "numpy", "torch", "keyed", "callback"))
    )
    expected = ["number=1", "[1. 1. 1.", "tensor([1., 1.", "(3, 64) [ True False  True]", "1 user [  0   1   2"]
    assert [each for each in expected if each in printed] == expected
    _, updated, put = visitor.shell(SERVICE.block("policy"))
    assert "top_k=5 % of the changed rows, value_type=int8 (was" in updated
    assert '"top_k":0.05' in put
    assert visitor.script(blocks["admin"]) == "['edge', 'mobile', 'predictors']\n"


def test_a_service_with_tls_and_roles_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_curl()
    monkeypatch.chdir(tmp_path)  # Where the files are that the service is given.
    arguments = shlex.split(SERVICE.block("guarded"))[2:]
    service = ServiceProcess(tmp_path / "data", *arguments)
    service.grpc, service.http = "localhost:50051", "http://localhost:8080"
    Visitor(service, tmp_path).shell(SERVICE.block("access"))
    with service:
        grpc, http = (each.rpartition(":")[2] for each in (service.grpc, service.http))
        service.grpc, service.http = f"localhost:{grpc}", f"https://localhost:{http}"
        code = SERVICE.block("status").replace("https://localhost:8080", service.http)
        answer, table, paused, revoked = Visitor(service, tmp_path).shell(code)
    assert '"state":"empty"' in answer
    assert "consumer predictors" in table
    assert "paused" in paused
    assert revoked == "certificate trainer revoked\n"


@pytest.mark.skipif(PROGRAM is None, reason="no redis-server or valkey-server is installed")
@_visits("sync_service/README.md")
def test_the_store_s_example_runs(visitor: Visitor) -> None:
    (visitor.folder / "redis").mkdir()
    with RedisServer(visitor.folder / "redis") as server:
        blocks, here = SERVICE.named("python"), f"unix_socket_path={server.socket!r}"
        code = blocks["publisher"] + blocks["redis"].replace('host="localhost"', here)
        assert "1 [ True False]" in visitor.script(code)


@_visits("sync_service/README.md")
def test_the_quantised_model_follows_a_trainer(visitor: Visitor) -> None:
    table = TableSpec("sparse.embedding_bags.user", 1000, 64)
    with Trainer(visitor.service.grpc, [table]) as trainer:
        trainer.publish_all()
        printed = visitor.script(SERVICE.block("quantised"))
    held = as_sent(table, trainer.rows[table.name][[3, 14]], ValueType.INT8_TBE)
    expected = ValueType.INT8_TBE.decode(held, table.dtype).sum(axis=0)
    [values] = re.findall(r"tensor\(\[\[(.*)\]\]\)", printed, re.DOTALL)
    # As many digits as are printed.
    assert [float(each) for each in values.split(",")] == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.nightly
@_visits("sync_service/README.md")
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
        printed = visitor.script(SERVICE.block("compiled"))
    [value] = re.findall(r"tensor\(\[\[(.*)\]\]\)", printed)
    # As many digits as are printed.
    assert float(value) == pytest.approx(expected, abs=1e-3)


@_visits("sync_service/README.md")
def test_the_protocol_s_replica_takes_what_is_published(visitor: Visitor) -> None:
    visitor.script(SERVICE.block("publisher"))
    printed = visitor.script("".join(PROTOCOL.named("python").values()))
    assert printed == f"{1000 * (8 + 64 * 4)} bytes of rows taken\n"


@_visits("README.md")
def test_the_examples_of_the_trainer_go_on_from_that_of_the_readme(visitor: Visitor) -> None:
    setup = README.block(TRAINER).partition("with DeltaSync(")[0]
    trainer = document("trainer/README.md").named("python")
    tracker = document("trainer/deltasync/trainer/tracking/README.md").named("python")
    pipeline = document("trainer/deltasync/trainer/pipelines/README.md").named("python")
    blocks = [setup, *trainer.values(), *tracker.values(), *pipeline.values(), "dist.destroy_process_group()\n"]
    printed = visitor.script("\n".join(blocks))
    assert "sparse.embedding_bags.user" in printed
    assert "40 Position(" in printed
