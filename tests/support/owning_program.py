"""A process that only runs `SharedOwners`, on real brokers: `... tests.support.owning_program URL NAME LEASE`.

It keeps appending to the logs of its models, and prints one line per event.
"""

import asyncio
import signal
import sys

import nats
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from deltasync.base.errors import Owner
from deltasync.base.events import Event, Events, event_line
from deltasync.cluster.bucket import ClusterOptions, Member
from deltasync.cluster.nats_bucket import NatsBucket
from deltasync.cluster.shared_owners import SharedOwners

PREFIX = "LOG_"


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Logs:
    """Streams of one subject; appends state the expected last sequence number."""

    def __init__(self, js: JetStreamContext, name: str) -> None:
        self._js, self._name = js, name
        self.last = dict[str, int]()

    async def take(self, model: str, owner: Owner) -> None:
        try:
            info = await self._js.stream_info(PREFIX + model)
        except NotFoundError:
            info = await self._js.add_stream(name=PREFIX + model, subjects=[f"log.{model}"])
        last = info.state.last_seq
        while not await self.append(model, "fence", last):
            last = (await self._js.stream_info(PREFIX + model)).state.last_seq
        say("take", model, owner.epoch)

    async def append(self, model: str, what: str, last: int) -> bool:
        headers = {"Nats-Expected-Last-Sequence": str(last)}
        try:
            ack = await self._js.publish(f"log.{model}", f"{self._name} {what}".encode(), headers=headers)
        except APIError as error:
            if error.err_code not in (10071, 10164):
                raise
            return False
        self.last[model] = ack.seq
        return True

    async def give_up(self, model: str, reason: str) -> None:
        self.last.pop(model, None)
        say("give_up", model, reason)

    async def save(self, model: str) -> None:
        say("save", model)

    async def forget(self, model: str) -> None:
        say("forget", model)

    async def models_with_log(self) -> list[str]:
        infos = await self._js.streams_info()
        return [str(each.config.name)[len(PREFIX) :] for each in infos if str(each.config.name).startswith(PREFIX)]


async def main(url: str, name: str, lease: float) -> None:
    client = await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05)
    logs = Logs(client.jetstream(timeout=1), name)
    ownership = SharedOwners(
        ClusterOptions(lease_seconds=lease),
        Member(name, f"{name}:1", f"http://{name}", run=name),
        NatsBucket(client, "deltasync_owners", timeout_seconds=lease / 3),
        logs,
        Events(_said),
    )
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await ownership.start()
    while not ending.is_set():
        for model, last in dict(logs.last).items():
            try:
                fenced = not await logs.append(model, "cut", last)
            except nats.errors.TimeoutError:
                continue  # Whether it has arrived is found out with the next one.
            if fenced and logs.last.get(model) == last:
                say("refused", model)
                await ownership.lost(model, "its log is fenced")
        await asyncio.sleep(0.01)
    await ownership.close()
    await client.close()


def _said(event: Event) -> None:
    say("event", event_line(event))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
