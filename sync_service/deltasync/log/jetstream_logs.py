"""The logs of models among brokers: each in a stream of its own, of which one process at a time is the owner."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Sequence
from typing import Any

from deltasync.base.errors import NotOwner, Owner, StorageFailed
from deltasync.log.brokers import LOOK_AT_BROKERS, BrokerOptions, Brokers, BrokerVolume, refused_by_brokers
from deltasync.log.jetstream_index import Index, Names, fence_note, model_of
from deltasync.log.jetstream_sender import EXPECTED, ID, Fence, message_id
from deltasync.log.jetstream_store import JetStreamStore, messages
from deltasync.log.log_store import LogStore, LogUnavailable

# So long a broker knows the ids of messages, to take none twice.
_TWICE_NS = 120 * 10**9
_FENCE_TRIES = 100
_MONITOR_SECONDS = 5.0


class JetStreamLogs:
    """The logs that this process has open: a `Logs`. What blocks, blocks; any thread.

    Attributes:
        commits: how long it took until writes were acknowledged.
        accepted_risks: how what brokers acknowledge could be lost all the same, in words.
    """

    def __init__(self, options: BrokerOptions, process: str) -> None:
        """`process` is what brokers call this process.

        Raises:
            StorageFailed: no broker can be used.
        """
        self._options = options
        self._brokers = Brokers(options, process)
        self._volume = BrokerVolume(options.words)
        self.commits = self._volume.commits
        self._open = dict[str, JetStreamStore]()
        self.accepted_risks: list[str] = []
        self._lock = threading.Lock()

    def of(self, model: str) -> LogStore:
        """The log of a model that is open here.

        Raises:
            NotOwner: it is not.
        """
        if found := self._open.get(model):
            return found
        raise NotOwner(f"model {model!r} is not here; try again")

    def each(self) -> Sequence[LogStore]:
        """Those that are open."""
        return list(self._open.values())

    @property
    def refusing(self) -> bool:
        """Whether one of them has no room."""
        return any(log.refusing for log in self._open.values())

    def open(self, model: str, owner: Owner) -> LogStore:
        """Have a model's log, which is made if there is none: from here on, who had it before writes nothing.

        Raises:
            StorageFailed: brokers do not answer, or refuse it.
        """
        names = Names(self._options.prefix, model)
        index, fence = self._brokers.run(self._opened(names, owner))
        log = JetStreamStore(self._brokers, names, index, fence, self._volume)
        with self._lock:
            self._open = {**self._open, model: log}
        return log

    def close_log(self, model: str, *, written: bool) -> None:
        """Have a log no more; what is submitted is `written` before, or refused."""
        with self._lock:
            log = self._open.get(model)
            self._open = {name: each for name, each in self._open.items() if name != model}
            self._volume.troubles.pop(model, None)
        if log:
            log.close() if written else log.abandon()

    def lost(self, model: str) -> StorageFailed | None:
        """Why a log that is open is this process's no more, or not what it was; None while it is."""
        log = self._open.get(model)
        if log is None:
            return None
        with contextlib.suppress(StorageFailed):  # Nobody answers: `trouble` says so.
            log.check()
        self._volume.troubles[model] = log.trouble
        return log.lost

    def known_models(self) -> list[str]:
        """The models that have a log.

        Raises:
            StorageFailed: brokers do not answer.
        """
        return self._brokers.run(self._known())

    def delete(self, model: str) -> None:
        """Remove the log of a model, with all that it has.

        Raises:
            StorageFailed: brokers do not answer.
        """
        names = Names(self._options.prefix, model)
        found = self._brokers.run(self._brokers.ask(f"STREAM.DELETE.{names.stream}"))
        if found.get("error", {}).get("code", 404) != 404:
            raise StorageFailed(refused_by_brokers(names.stream, found["error"]))

    def risks(self) -> list[str]:
        """How what the brokers acknowledge could be lost all the same, as far as that can be known, in words."""
        options = self._options
        found = [f"logs are kept by {options.replicas} broker: expected 3"] if options.replicas < 3 else []
        if not options.monitors:
            return [*found, "nothing says whether brokers sync to disk what they acknowledge: see --log-monitor"]
        for monitor in options.monitors:
            if risk := _risk_of(monitor):
                found.append(risk)
        return found

    def close(self) -> None:
        """Write what was submitted, and end."""
        for model in list(self._open):
            self.close_log(model, written=True)
        self._brokers.close()

    # In the brokers' event loop.

    async def _opened(self, names: Names, owner: Owner) -> tuple[Index, Fence]:
        await self._have_stream(names)
        fence = await self._fenced(names, owner)
        return await self._indexed(names, fence.sequence), fence

    async def _have_stream(self, names: Names) -> None:
        wanted = {
            "name": names.stream,
            "subjects": [names.subjects],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "num_replicas": self._options.replicas,
            "duplicate_window": _TWICE_NS,
            "deny_delete": True,
            # Else, where a stream is made anew, somebody who had the one before could go on with this one.
            "first_seq": time.time_ns() // 1000,
        }
        found = await self._brokers.ask(f"STREAM.INFO.{names.stream}")
        if "error" in found and found["error"].get("code") == 404:
            found = await self._brokers.ask(f"STREAM.CREATE.{names.stream}", wanted)
        elif "error" not in found and found["config"]["num_replicas"] < self._options.replicas:
            changed = {**found["config"], "num_replicas": self._options.replicas}
            found = await self._brokers.ask(f"STREAM.UPDATE.{names.stream}", changed)
        if "error" in found:
            raise StorageFailed(refused_by_brokers(names.stream, found["error"]))
        _check_config(names, found["config"], self._options.replicas)

    async def _fenced(self, names: Names, owner: Owner) -> Fence:
        """Append who is the owner from here on: where somebody else appends meanwhile, again."""
        session = uuid.uuid4().hex
        for _ in range(_FENCE_TRIES):
            found = await self._brokers.ask(f"STREAM.INFO.{names.stream}")
            if "error" in found:
                raise LogUnavailable(refused_by_brokers(names.stream, found["error"]))
            last = int(found["state"]["last_seq"])
            headers = {ID: message_id(session, 0), EXPECTED: str(last)}
            note = fence_note(owner.process, owner.epoch)
            try:
                answer = await self._brokers.client.request(names.fences, note, timeout=5, headers=headers)
            except Exception as error:
                raise LogUnavailable(f"brokers do not take a message: {error!r}: {LOOK_AT_BROKERS}") from error
            taken = json.loads(answer.data or b"{}")
            if taken.get("seq") == last + 1:
                return Fence(session, found["created"], last + 1)
            await asyncio.sleep(0.05)
        raise StorageFailed(
            f"stream {names.stream}: another process keeps appending to it: give each service a --log-prefix of "
            "its own"
        )

    async def _indexed(self, names: Names, fence: int) -> Index:
        """The index of what a stream has up to the fence of this process."""
        index, owner = Index(), ""
        rows, notes = (names.rows, names.fences), (names.notes, names.fences)
        found = {
            each.sequence: each
            async for each in messages(self._brokers, names.stream, rows, fence, headers_only=True)
        }
        found |= {each.sequence: each async for each in messages(self._brokers, names.stream, notes, fence)}
        for _, each in sorted(found.items()):
            if each.subject == names.fences:
                owner = each.session
                index.note_fence()
            elif each.session != owner:
                continue  # Of an owner before: nobody was told that it has landed.
            elif each.subject == names.notes:
                index.add_note(each.payload)
            else:
                index.add_piece(each.sequence, *names.parsed(each.subject), each.size)
        return index

    async def _known(self) -> list[str]:
        names, more = list[str](), True
        while more:
            found = await self._brokers.ask("STREAM.NAMES", {"offset": len(names)})
            if "error" in found:
                raise LogUnavailable(
                    f"brokers do not say which streams there are: {found['error']}: {LOOK_AT_BROKERS}"
                )
            names += found.get("streams") or []
            more = bool(found.get("streams")) and len(names) < found.get("total", 0)
        models = (model_of(self._options.prefix, name) for name in names)
        return sorted(model for model in models if model)


def _check_config(names: Names, config: dict[str, Any], replicas: int) -> None:
    """Check that a stream that was there is as this service makes them.

    Raises:
        StorageFailed: it is not.
    """
    limits = {name: config.get(name) for name in ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject")}
    wrong = [f"{name} {value}" for name, value in limits.items() if value not in (None, 0, -1)]
    wrong += [] if config["storage"] == "file" else [f"storage {config['storage']}"]
    wrong += [] if config["num_replicas"] >= replicas else [f"{config['num_replicas']} replicas"]
    if wrong:
        raise StorageFailed(
            f"stream {names.stream} could lose what it has acknowledged: {', '.join(wrong)}: have it kept in "
            f"files, by {replicas} brokers and without limits, or give the service another --log-prefix"
        )


def _risk_of(monitor: str) -> str:
    """How a broker could lose what it has acknowledged, as its monitoring port says; empty if it could not."""
    try:
        # A proxy of the environment is for other hosts than the brokers.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{monitor.rstrip('/')}/jsz", timeout=_MONITOR_SECONDS) as answer:
            config = json.loads(answer.read()).get("config") or {}
    except (OSError, ValueError) as error:
        return f"broker {monitor} does not say whether it syncs to disk what it acknowledges: {error}"
    if not config.get("sync_always"):
        return f"broker {monitor} syncs to disk now and then: set jetstream.sync_interval to always"
    return ""
