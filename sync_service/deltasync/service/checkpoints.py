"""Writes the checkpoints of all models, and shortens the log after each."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

from deltasync.base.errors import NotFound, ServiceUnavailable, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import first_of
from deltasync.base.words import counted
from deltasync.checkpoints.manifest import Manifest
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.log.log_store import LogStore
from deltasync.log.records import reading, unpack_json
from deltasync.model.model import Model
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.views.log import view_name
from deltasync.views.registry import ViewRegistry

T = TypeVar("T")
Check = Callable[[], None]


class Checkpoints:
    """Writes and copies the checkpoints of models, one at a time per model. Used in the event loop."""

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        views: ViewRegistry,
        options: ServiceOptions,
        events: Events,
        draining: asyncio.Event,
    ) -> None:
        self._models = models
        self._registry = registry
        self._views = views
        self._options = options
        self._events = events
        self._draining = draining
        self._states = dict[Model, _State]()
        self._silent = False  # Whether the last event said that the service's URL does not answer.
        self.failures = 0

    @property
    def troubles(self) -> list[str]:
        """Why checkpoints fail, or old ones stay, in words."""
        return [
            f"checkpoints of model {each!r}: {why}" for each in sorted(self._models) if (why := self.trouble(each))
        ]

    def trouble(self, model: str) -> str:
        """The same for a model; empty if everything succeeds."""
        state = self._states.get(self._models[model]) if model in self._models else None
        return self.failure(model) or (state.left_behind if state else "")

    def failure(self, model: str) -> str:
        """Why the last checkpoint of a model could not be written or copied; empty if it could."""
        state = self._states.get(self._models[model]) if model in self._models else None
        if state is None or state.writing.failure or not state.copying.failure:
            return state.writing.failure if state else ""
        copied = self._models[model].checkpoints.copied_version
        complete = f"the copy of version {copied} is complete" if copied else "no copy is complete"
        return f"{state.copying.failure}; {complete} there"

    async def run(self) -> None:
        """Write and copy the checkpoints that are due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._options.look_seconds)
                self._look_at_storage()
                self._states = {model: self._state(model) for model in self._models.values()}
                for model, state in self._states.items():
                    if state.writing.may_begin and self._is_due(model, state):
                        tasks.create_task(self._try(self._write(model, state)))
                    if state.copying.may_begin and self._lacks_copy(state):
                        tasks.create_task(self._try(self._copy(model, state)))

    def _look_at_storage(self) -> None:
        """Report that the service's URL does not answer, and the end of that."""
        remote = self._models.storage.remote
        if remote and (trouble := remote.trouble) and not self._silent:
            text = f"{trouble}; copies and kept versions wait, everything else goes on"
            self._events.emit(EventKind.STORAGE_SILENT, text, directory=remote.url)
        elif remote and self._silent and not trouble:
            self._events.emit(EventKind.STORAGE_ANSWERS, directory=remote.url)
        self._silent = bool(remote and trouble)

    async def make(self, name: str) -> Manifest:
        """Write a checkpoint of a model now, and copy it."""
        manifest = await self.write(name)
        model = self._models.model(name)
        if self._lacks_copy(self._state(model)):
            await self._copy(model, self._state(model))
        return manifest

    async def write(self, name: str) -> Manifest:
        """Write a checkpoint of a model now, in the data directory alone."""
        model = self._models.model(name)
        return await self._write(model, self._state(model))

    async def _try(self, work: Awaitable[object]) -> None:
        # The failure is already reported, and `run` tries again.
        with contextlib.suppress(Exception):
            await work

    def _state(self, model: Model) -> "_State":
        if model not in self._states:
            self._states[model] = _State(model, self._options)
        return self._states[model]

    def _is_due(self, model: Model, state: "_State") -> bool:
        now, before = time.monotonic(), model.checkpointed
        newer = model.seals.newest_version - (before.version if before else 0)
        if model.head is None or model.tables.failed:
            return False
        if model.log.refusing:
            return newer > 0 or now >= state.made_room + self._options.checkpoint_retry_seconds
        return newer > 0 and (
            now >= state.due
            or newer >= self._options.checkpoint_versions
            or model.bytes_since_checkpoint >= self._options.most_log_bytes
        )

    def _lacks_copy(self, state: "_State") -> bool:
        newest, copied = list(state.written)[-1:], list(state.copied)[-1:]
        return bool(self._options.checkpoints and newest and newest != copied)

    async def _write(self, model: Model, state: "_State") -> Manifest:
        """Write a checkpoint, truncate the log, and remove older checkpoints."""
        began = time.monotonic()
        async with state.writing.turn:
            with self._recorded(model, state.writing, "its checkpoint could not be written; this will be retried"):
                if model.seals.newest is None:
                    raise NotFound(f"model {model.name!r} has no published version to write")
                await self._registry.offsets_written(model.log)
                views, small = partial(self._views.of_model, model), partial(small_records, model.log, model.name)
                manifest = await self._unless_left(model, partial(model.checkpoint, views, small))
                state.written.append(manifest)
                state.due = began + self._options.checkpoint_seconds
                await self._truncate_log(model, state, state.written, remote=False)
            await self._remove_old(model, state, remote=False)
            text = f"{counted(manifest.bytes, 'byte')}, {manifest.new_bytes} of them new"
            self._events.emit(EventKind.CHECKPOINTED, text, model=model.name, version=manifest.version)
            return manifest

    async def _copy(self, model: Model, state: "_State") -> None:
        """Copy the newest checkpoint to the service's URL."""
        async with state.copying.turn:
            with self._recorded(model, state.copying, "its checkpoint could not be copied; this will be retried"):
                if not self._lacks_copy(state):  # Another caller copied it during the wait.
                    return
                manifest = state.written[-1]
                copy = partial(in_own_thread, model.checkpoints.copy_to_remote, manifest)
                await self._unless_left(model, copy, may_hang=True)
                state.copied.append(manifest)
                await self._truncate_log(model, state, state.copied, remote=True)
            await self._remove_old(model, state, remote=True)

    async def _remove_old(self, model: Model, state: "_State", *, remote: bool) -> None:
        """Remove older checkpoints. The newest one is complete even if this fails."""
        try:
            await in_own_thread(model.checkpoints.remove_old, self._options.keep_checkpoints, remote=remote)
        except StorageFailed as error:
            state.left_behind = f"old checkpoints could not be removed: {error}"
            text = "old checkpoints could not be removed; the service tries again after the next one"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)
        else:
            state.left_behind = ""

    @contextlib.contextmanager
    def _recorded(self, model: Model, work: "_Work", text: str) -> Iterator[None]:
        """Record whether work on a model succeeds."""
        try:
            yield
        except (NotFound, ServiceUnavailable):
            raise  # These errors do not count: another attempt may succeed.
        except Exception as error:
            self.failures += 1
            work.record(error)
            self._events.emit(EventKind.FAILED, text, error, model=model.name)
            raise
        work.record(None)

    async def _unless_left(
        self, model: Model, work: Callable[[Check], Awaitable[T]], *, may_hang: bool = False
    ) -> T:
        """See `unless_left`; work also ends once the model leaves this process."""

        def check() -> None:
            if self._models.get(model.name) is not model:
                raise ServiceUnavailable(f"model {model.name!r} has left this process")

        return await unless_left(work, self._draining, check, may_hang=may_hang)

    async def _truncate_log(
        self, model: Model, state: "_State", newest: Sequence[Manifest], *, remote: bool
    ) -> None:
        """Drop the log up to the second newest checkpoint of a place.

        A shared log counts only remote checkpoints. A full log is dropped up to the newest one, which shares
        almost all files with the one before it.
        """
        log = model.log
        upto = list(newest)[-1:] if log.refusing else list(newest)[-2:-1]
        if upto and log.shared == remote:
            before = model.store.dropped
            await in_own_thread(model.truncate_log, upto[0], self._views.of_model(model))
            if log.refusing:
                if model.store.dropped == before:
                    await in_own_thread(model.store.keep_fewer_seals, upto[0].version)
                state.made_room = time.monotonic()
                log.refusing = False  # If there is still no room, the log refuses the next write.
                for coordinator in self._models.publishers():
                    coordinator.note_room()


async def unless_left(
    work: Callable[[Check], Awaitable[T]],
    draining: asyncio.Event,
    check: Check = lambda: None,
    *,
    may_hang: bool = False,
    end_seconds: float | None = None,
) -> T:
    """Run work with a check to call regularly, which raises once the result is no longer needed.

    Work that `may_hang` waits for storage that may not answer: it must not keep the process at shutdown. A caller
    that is cancelled waits at most `end_seconds` for the end of the work.
    """
    left = False

    def check_all() -> None:
        if left:
            raise ServiceUnavailable("the caller disconnected")
        if draining.is_set():
            raise ServiceUnavailable("the service is shutting down")
        check()

    doing = asyncio.ensure_future(work(check_all))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        left = True
        await first_of(*([draining.wait()] if may_hang else []), tasks=[doing], seconds=end_seconds)
        doing.add_done_callback(lambda each: each.cancelled() or each.exception())  # Nobody waits for it.
        raise


def small_records(log: LogStore, model: str) -> dict[str, bytes]:
    """The small records in a checkpoint: of a model, its deletes, its consumers, and their views and offsets."""
    consumers = [name for name, of_model in models_of_consumers(log).items() if of_model == model]
    names = [f"model/{model}", f"quarantine/{model}"]
    names += [each for name in consumers for each in (f"consumer/{name}", view_name(name))]
    groups = [f"delete/{model}/", f"deleted/{model}/", *(f"offset/{name}/" for name in consumers)]
    found = {name: value for name in names if (value := log.items(name).get("")) is not None}
    return found | {group + rest: value for group in groups for rest, value in log.items(group).items()}


def records_of_others(log: LogStore, models: Collection[str]) -> dict[str, bytes]:
    """The records of consumers of other models than these."""
    names = (f"consumer/{name}" for name, model in models_of_consumers(log).items() if model not in models)
    return {name: log.items(name)[""] for name in names}


def models_of_consumers(log: LogStore) -> dict[str, str]:
    """The model of each recorded consumer, by the consumer's name."""
    models = {}
    for name, record in log.items("consumer/").items():
        with reading(f"record consumer/{name}"):
            models[name] = str(unpack_json(record)["model"])
    return models


class _Work:
    """Repeated work on a model, one run at a time, with growing pauses after failures."""

    def __init__(self, options: ServiceOptions) -> None:
        self.turn, self.failure = asyncio.Lock(), ""
        self._options = options
        self._pause = options.checkpoint_retry_seconds
        self._next = 0.0

    @property
    def may_begin(self) -> bool:
        """Whether no run is under way and the pause after a failure is over."""
        return not self.turn.locked() and time.monotonic() >= self._next

    def record(self, error: Exception | None) -> None:
        """Record the result of a run."""
        self.failure = str(error) if error else ""
        if error:
            self._next = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, self._options.checkpoint_seconds)
        else:
            self._pause, self._next = self._options.checkpoint_retry_seconds, 0.0


class _State:
    """The state of a model's checkpoints.

    Attributes:
        due: when to write the next one, by `time.monotonic`.
        left_behind: why older checkpoints could not be removed; empty if they could.
        made_room: when a checkpoint was last written because the log was full.
        written: the newest two in the data directory, oldest first.
        copied: the newest two that this process copied to the URL, oldest first.
    """

    def __init__(self, model: Model, options: ServiceOptions) -> None:
        self.writing, self.copying = _Work(options), _Work(options)
        self.due, self.made_room, self.left_behind = time.monotonic() + options.checkpoint_seconds, 0.0, ""
        self.written = deque([each for each in (model.checkpointed,) if each], 2)
        self.copied = deque[Manifest]([], 2)
