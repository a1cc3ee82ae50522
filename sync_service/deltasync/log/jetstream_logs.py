"""Logs of models on brokers: one stream a model, with one owning process at a time."""

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Sequence

from deltasync.base.errors import NotOwner, Owner, StorageFailed
from deltasync.log.brokers import LOOK_AT_BROKERS, BrokerOptions, Brokers, BrokerVolume, refused_by_brokers
from deltasync.log.jetstream_store import Index, JetStreamStore
from deltasync.log.jetstream_stream import (
    EXPECTED,
    ID,
    Fence,
    LogSubjects,
    ReadOptions,
    message_id,
    messages,
    model_of,
    unsafe,
)
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.records import pack_json

# How long a broker remembers message ids, in order to refuse duplicates.
_TWICE_NS = 120 * 10**9
_FENCE_TRIES = 100
_MONITOR_SECONDS = 5.0


class JetStreamLogs:
    """The logs that this process has opened: a `Logs`. Any thread may call it; methods wait for brokers."""

    def __init__(self, options: BrokerOptions, process: str) -> None:
        """Connect to the brokers, which show this process under the name `process`."""
        self._options = options
        self._brokers = Brokers(options, process)
        self._volume = BrokerVolume(options.description)
        self.commits = self._volume.commits
        self._open = dict[str, JetStreamStore]()
        self.accepted_risks: list[str] = []
        self._lock = threading.Lock()

    def of(self, model: str) -> LogStore:
        """The log of a model that this process has opened."""
        if log := self._open.get(model):
            return log
        raise NotOwner(f"model {model!r} is not in this process; try again")

    def each(self) -> Sequence[LogStore]:
        """The open logs."""
        return list(self._open.values())

    @property
    def refusing(self) -> bool:
        """Whether an open log lacks room."""
        return any(log.refusing for log in self._open.values())

    def open(self, model: str, owner: Owner) -> LogStore:
        """Open a model's log, and make it if it is missing. Its previous owner can then no longer write to it."""
        subjects = LogSubjects(self._options.prefix, model)
        self._brokers.run(self._make_stream(subjects))
        fence = self._brokers.run(self._append_fence(subjects, owner))
        index = self._brokers.run(self._indexed(subjects, fence.sequence))
        log = JetStreamStore(self._brokers, subjects, index, fence, self._volume)
        with self._lock:
            self._open = {**self._open, model: log}
        return log

    def close_log(self, model: str, *, written: bool) -> None:
        """Close a log. If `written`, first write what was submitted; otherwise refuse it."""
        with self._lock:
            log = self._open.get(model)
            self._open = {name: each for name, each in self._open.items() if name != model}
            self._volume.troubles.pop(model, None)
        if log:
            log.close() if written else log.abandon()

    def lost(self, model: str) -> StorageFailed | None:
        """Why this process no longer owns an open log, or lost records of it; None if all is well."""
        log = self._open.get(model)
        if log is None:
            return None
        with contextlib.suppress(StorageFailed):  # No broker answers, which `trouble` reports.
            log.check()
        with self._lock:
            if self._open.get(model) is log:  # The trouble of a log that was closed meanwhile would never end.
                self._volume.troubles[model] = log.trouble
        return log.lost

    def known_models(self) -> list[str]:
        """The models that have a log."""
        return self._brokers.run(self._models())

    def delete(self, model: str) -> None:
        """Remove the log of a model with all its records."""
        subjects = LogSubjects(self._options.prefix, model)
        answer = self._brokers.run(self._brokers.ask(f"STREAM.DELETE.{subjects.stream}"))
        if answer.get("error", {}).get("code", 404) != 404:
            raise StorageFailed(refused_by_brokers(subjects.stream, answer["error"]))

    def risks(self) -> list[str]:
        """Ways to lose acknowledged writes that the brokers' settings allow, in words."""
        options = self._options
        risks = [f"{options.replicas} broker keeps each log, expected 3"] if options.replicas < 3 else []
        if not options.monitors:
            return [*risks, "it is unknown whether brokers sync each write to disk: set --log-monitor"]
        return [*risks, *filter(None, map(_risk_of, options.monitors))]

    def close(self) -> None:
        """Finish the submitted writes, and close the connection."""
        for model in list(self._open):
            self.close_log(model, written=True)
        self._brokers.close()

    # The methods below run in the brokers' event loop.

    async def _make_stream(self, subjects: LogSubjects) -> None:
        """Make the stream of a log, or check the one that exists."""
        config = {
            "name": subjects.stream,
            "subjects": [subjects.subjects],
            "storage": "file",
            "retention": "limits",
            "discard": "new",
            "num_replicas": self._options.replicas,
            "duplicate_window": _TWICE_NS,
            "deny_delete": True,
            # If sequences began at 1, the owner of a deleted stream could continue in a new stream of its name.
            "first_seq": time.time_ns() // 1000,
        }
        answer = await self._brokers.ask(f"STREAM.INFO.{subjects.stream}")
        if "error" in answer and answer["error"].get("code") == 404:
            answer = await self._brokers.ask(f"STREAM.CREATE.{subjects.stream}", config)
        elif "error" not in answer and answer["config"]["num_replicas"] < self._options.replicas:
            changed = {**answer["config"], "num_replicas": self._options.replicas}
            answer = await self._brokers.ask(f"STREAM.UPDATE.{subjects.stream}", changed)
        if "error" in answer:
            raise StorageFailed(refused_by_brokers(subjects.stream, answer["error"]))
        if trouble := unsafe(answer, self._options.replicas):
            raise StorageFailed(f"{trouble}; or give the service another --log-prefix")

    async def _append_fence(self, subjects: LogSubjects, owner: Owner) -> Fence:
        """Append a fence for the owner, and retry while other processes append first."""
        session, note = uuid.uuid4().hex, pack_json({"process": owner.process, "epoch": owner.epoch})
        for _ in range(_FENCE_TRIES):
            stream = await self._brokers.ask(f"STREAM.INFO.{subjects.stream}")
            if "error" in stream:
                raise LogUnavailable(refused_by_brokers(subjects.stream, stream["error"]))
            last = int(stream["state"]["last_seq"])
            headers = {ID: message_id(session, 0), EXPECTED: str(last)}
            try:
                answer = await self._brokers.client.request(subjects.fences, note, timeout=5, headers=headers)
            except Exception as error:
                raise LogUnavailable(f"brokers accept no message: {error!r}: {LOOK_AT_BROKERS}") from error
            if json.loads(answer.data or b"{}").get("seq") == last + 1:
                return Fence(session, stream["created"], last + 1)
            await asyncio.sleep(0.05)
        raise StorageFailed(
            f"stream {subjects.stream}: another process keeps appending to it: give each service its own "
            "--log-prefix"
        )

    async def _indexed(self, subjects: LogSubjects, fence: int) -> Index:
        """The index of a stream's content up to the fence of this process."""
        index, session = Index(), ""
        # The headers of row records are enough.
        rows = messages(
            self._brokers, subjects.stream, (subjects.rows, subjects.fences), fence, ReadOptions(headers_only=True)
        )
        by_sequence = {each.sequence: each async for each in rows}
        notes = messages(self._brokers, subjects.stream, (subjects.notes, subjects.fences), fence)
        by_sequence |= {each.sequence: each async for each in notes}
        for _, each in sorted(by_sequence.items()):
            if each.subject == subjects.fences:
                session = each.session
                index.note_fence()
            elif each.session != session:
                continue  # It belongs to an earlier owner, which never learned that it arrived.
            elif each.subject == subjects.notes:
                index.add_note(each.payload)
            else:
                index.add_piece(each.sequence, *subjects.parsed(each.subject), each.size)
        return index

    async def _models(self) -> list[str]:
        names, more = list[str](), True
        while more:
            answer = await self._brokers.ask("STREAM.NAMES", {"offset": len(names)})
            if "error" in answer:
                raise LogUnavailable(f"brokers do not list their streams: {answer['error']}: {LOOK_AT_BROKERS}")
            names += answer.get("streams") or []
            more = bool(answer.get("streams")) and len(names) < answer.get("total", 0)
        models = (model_of(self._options.prefix, name) for name in names)
        return sorted(model for model in models if model)


def _risk_of(monitor: str) -> str:
    """How a broker could lose acknowledged writes, by its monitoring port; empty if it cannot."""
    try:
        # Brokers are reached directly, even where the environment names a proxy.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{monitor.rstrip('/')}/jsz", timeout=_MONITOR_SECONDS) as answer:
            config = json.loads(answer.read()).get("config") or {}
    except (OSError, ValueError) as error:
        return f"broker {monitor} does not report whether it syncs each write to disk: {error}"
    if not config.get("sync_always"):
        return f"broker {monitor} syncs to disk only from time to time: set jetstream.sync_interval to always"
    return ""
