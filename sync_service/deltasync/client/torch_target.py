"""Rows into the parameters and buffers of a torch module."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from deltasync.client.targets import Release
from deltasync.client.torch_binding import Binding, Place, Tensor, accelerators, bind, in_training, missing_maps
from deltasync.client.torch_compiled import compiled_modules
from deltasync.core.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec

__all__ = ["TorchTarget"]

logger = logging.getLogger(__name__)


class TorchTarget:
    """Writes tables into a module's parameters and buffers: an `EmbeddingBagCollection`, or a whole model.

    A table belongs to the parameter or buffer whose name, without ".weight", is the table's name or the end of it:
    table "sparse.embedding_bags.user" to "embedding_bags.user.weight" of a lone collection. Of several tables the
    one of that very name has it, then the one that had it first. A map of raw ids belongs to the managed collision
    module of its name, which must be in evaluation mode and neither scripted nor sharded: ids that nobody knows
    then take the rows that they take in the trainer.

    Every table of the first release must have its place, but for those that are left out. Of tables that come
    later, or grow, the others are followed, and lag names those that have no place.

    Attributes:
        position: the one that the module is at, and
        event_time_unix_ns: the time of the newest event that the model had been trained on there, nanoseconds
            since 1970; None where it is not known. Read both inside `reading()`.
    """

    def __init__(self, module: nn.Module, *, leave_out: Sequence[str] = ()) -> None:
        """Write into `module`.

        Args:
            module: not replaced inside while it is followed; `to()` and `load_state_dict()` do no harm.
            leave_out: names of tables not to write, as shell patterns: "*.user". A table's map goes with it.

        Raises:
            InvalidInput: `leave_out` is one string.
        """
        self.position = Position()
        self.event_time_unix_ns: int | None = None
        if isinstance(leave_out, str):
            raise InvalidInput(f"leave_out: a string; expected a list of patterns, [{leave_out!r}]")
        self._module = module
        self._leave_out = tuple(leave_out)
        self._followed: list[TableSpec] = []
        self._binding = Binding({}, {}, [])
        self._early: dict[str, Place | None] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The module, with no release applied while the block runs."""
        with self._lock:
            yield self._module

    def tables(self) -> dict[str, torch.Tensor]:
        """The rows of every table received so far, as live [rows, dim] views of the parameters and buffers.

        Maps of raw ids have none. Those of a `CompiledModule` are live until the next release.
        """
        return {name: place.rows for name, place in self._binding.places.items() if isinstance(place, Tensor)}

    def bound(self) -> frozenset[str]:
        """Names of the tables of the last release that the module holds."""
        return frozenset(self._binding.places)

    def apply(self, release: Release) -> None:
        """Write a release into the module: all of it, or nothing where an error is raised.

        Raises:
            NotFound: a table has no place in the module and is not left out; the message names all of them.
            Contradiction: a place has another shape or type than its table, or several tables; the module cannot
                follow a map of raw ids; or the consumer streams ids only.
        """
        release.check_values()
        if release.tables != self._followed:
            self._follow(release.tables)
        if release.resync or release.whole:
            self._warn_of_training()
        writes, devices = self._staged(release), accelerators(self._module)
        # Inference mode, since a module may have been made in it: what it holds can be written in no other.
        with self._lock, torch.inference_mode():
            _finish(devices)  # What readers have begun there, on streams of their own.
            for write in writes:
                write()
            _finish(devices)
            self.position, self.event_time_unix_ns = release.position, release.event_time_unix_ns

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table as the module holds them, in host memory; None for a table that has no place."""
        place = self._binding.places.get(table.name) if self._followed else self._outlived(table)
        # A table that has grown meanwhile is not the one that is held.
        return place.read(ids) if place and place.table == table else None

    def _staged(self, release: Release) -> list[Callable[[], None]]:
        """What writes a release, prepared while others still read."""
        for compiled in compiled_modules(self._module):
            compiled.discard()
        rows: dict[str, list[RowBatch]] = {table.name: [] for table in release.tables if release.resets(table)}
        for each in release.rows:
            rows.setdefault(each.table.name, []).append(each)
        return [
            self._binding.places[table.name].stage(rows[table.name], reset=release.resets(table))
            for table in release.tables
            if table.name in rows and table.name in self._binding.places
        ]

    def _follow(self, tables: list[TableSpec]) -> None:
        """Bind the tables of a first release, or others than before."""
        taken = [table for table in tables if not self._leaves_out(table)]
        binding = bind(self._module, taken, self.bound())
        # What comes later has no place as long as the module is the one it was: the rest goes on.
        known = {table.name for table in self._followed if table in tables and table.name in self.bound()}
        refused = known if self._followed else set(binding.problems)
        _refuse([(name, problem) for name, problem in binding.problems.items() if name in refused])
        if not self._followed:
            self._check_first(tables, binding)
        for name in binding.problems.keys() - self._binding.problems.keys():
            logger.warning("not followed: %s", binding.problems[name])
        self._binding, self._followed, self._early = binding, tables, {}

    def _check_first(self, tables: list[TableSpec], binding: Binding) -> None:
        """Look for what the module needs and the tables of a first release do not bring."""
        missing = [name for name in missing_maps(self._module, binding) if not self._matches(name)]
        text = "the module maps raw ids by managed collision, and no table brings the map {}: update the trainer"
        _refuse([(name, NotFound(text.format(name))) for name in missing])
        names = [*(table.name for table in tables), *missing_maps(self._module, binding)]
        if idle := [each for each in self._leave_out if not any(fnmatchcase(name, each) for name in names)]:
            logger.warning("leave_out: no table fits %s", ", ".join(idle))
        left_out = bind(self._module, [table for table in tables if self._leaves_out(table)])
        wanted = {place.name for place in left_out.places.values()}
        if stale := [name for name in binding.stale if name not in wanted]:
            logger.warning("no table brings these of the module, which stay as they are: %s", ", ".join(stale))

    def _warn_of_training(self) -> None:
        """Say what may have changed, or will change, what the trainer brings: also when it has to be repaired."""
        if names := in_training(self._module, self._binding):
            logger.warning(
                "in training mode, in which a forward may change what follows the trainer: %s; call eval()",
                ", ".join(name or "the module" for name in names),
            )

    def _leaves_out(self, table: TableSpec) -> bool:
        return self._matches(table.name) or bool(table.of and self._matches(table.of))

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._leave_out)

    def _outlived(self, table: TableSpec) -> Place | None:
        """The place of a table before any release: a module may have outlived another process."""
        if table.name not in self._early:
            tables = [] if self._leaves_out(table) else [table]
            self._early[table.name] = bind(self._module, tables).places.get(table.name)
        return self._early[table.name]


def _finish(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _refuse(problems: list[tuple[str, DeltasyncError]]) -> None:
    if not problems:
        return
    kind = Contradiction if any(isinstance(each, Contradiction) for _, each in problems) else NotFound
    names, why = [name for name, _ in problems], "; ".join(_sentences(problems))
    raise kind(
        f"{why}. Nothing was written: give the target a module with places for them, let the consumer follow "
        f"other tables, or leave them out with TorchTarget(module, leave_out={names})"
    )


def _sentences(problems: list[tuple[str, DeltasyncError]]) -> list[str]:
    """What is wrong, one sentence for all tables of which the same is."""
    tables: dict[str, list[str]] = {}
    for name, problem in problems:
        subject, colon, what = str(problem).partition(": ")
        of_one = colon and subject == f"table {name!r}"
        tables.setdefault(what if of_one else str(problem), []).extend([name] if of_one else [])
    return [f"{_subject(names)}{what}" for what, names in tables.items()]


def _subject(names: list[str]) -> str:
    return f"table{'s' * (len(names) > 1)} {', '.join(map(repr, names))}: " if names else ""
