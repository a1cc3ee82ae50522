"""The target for a torch module, which writes to its parameters and buffers."""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase

from deltasync.base.arguments import check_type
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.base.words import counted
from deltasync.client.targets.local import LocalTarget, Side
from deltasync.client.targets.target import Reading, Reads, Release, TornTarget, Written, number_of_copies
from deltasync.client.targets.torch_binding import (
    Binding,
    TablePlace,
    accelerators,
    bind,
    in_training,
    missing_maps,
    part_that_fits,
)
from deltasync.client.targets.torch_compiled import compiled_modules
from deltasync.client.targets.torch_tensors import Tensor, value_types_of
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType

__all__ = ["ModuleReading", "TorchTarget"]

logger = logging.getLogger(__name__)

_SHOWN = 5  # Limit of names and problems in an error.
# Attributes of a module that `named_parameters` and similar methods cover.
_OWN = ("_parameters", "_buffers", "_modules")


class TorchTarget(LocalTarget["ModuleCopy", "ModuleReading"]):
    """Writes tables into a module's parameters and buffers: an `EmbeddingBagCollection`, or a whole model.

    A table's place is the parameter or buffer whose name, without ".weight", is the table's name or the end of it.
    For example, table "sparse.embedding_bags.user" fits "embedding_bags.user.weight" of a single collection. If
    several tables fit, the table with the exact name gets the place, else the one that had it first.

    The place of a map of raw ids is the managed collision module of its name. The module must be in evaluation
    mode and not scripted; it may be sharded for inference. Unknown ids get the same rows as in the trainer.

    To write to a module that is quantised by TorchRec or in half precision, set the consumer's value type to the
    module's: int8-tbe or int4-tbe, fp16 or bf16.

    Each table of the first release must have a place, except the tables in `leave_out`. If a table that is added
    or grows later has no place, the other tables are still updated, and lag names that table.
    """

    def __init__(self, module: nn.Module, *, leave_out: Sequence[str] = (), reads: Reads = "pause") -> None:
        """Write into `module`.

        Args:
            module: the module. Do not replace its submodules later. With `reads="pause"` you may still call `to()`
                and `load_state_dict()`.
            leave_out: tables not to write, as shell patterns of their names: "*.user". Also leaves out their maps.
            reads: "pause": readers wait while a release is written. "copies": no reader waits. The target copies
                the module and serves both in turn, so load it, move it to its device and call `eval()` before. Use
                the module of a `reading()` only, because `module` itself has mixed versions.

        Raises:
            TypeError: `module` is not a torch module.
            InvalidInput: `leave_out` is a string, or `reads` is not "pause" or "copies".
            Contradiction: the module cannot be copied.
        """
        check_type("TorchTarget(module)", "module", module, nn.Module, remedy="the model, not its state_dict()")
        if isinstance(leave_out, str):
            raise InvalidInput(f"leave_out: a string; expected a list of patterns, [{leave_out!r}]")
        self._leave_out = _LeaveOut(tuple(leave_out))
        self._followed: list[TableSpec] = []
        modules = [module, *(copy_of(module) for _ in range(number_of_copies(reads) - 1))]
        super().__init__(
            reads, [Side(ModuleCopy(each, self._leave_out), ModuleReading(module=each)) for each in modules]
        )

    @contextmanager
    def reading(self) -> Iterator["ModuleReading"]:
        """The module and its version: see `LocalTarget.reading`.

        Raises:
            TornTarget: see `LocalTarget.reading`; also before the first release, when the module has the weights
                with which you constructed it, unless the subscriber got their position (`held`).
        """
        with super().reading() as reading:
            if reading.step is None and not reading.position.number:
                raise TornTarget(
                    "no release has arrived yet, so the module has the weights with which it was constructed: "
                    "wait until the subscriber is ready (wait_until_ready); if they are those of a position, pass "
                    "it as SubscriberOptions(held=...)"
                )
            yield reading

    @property
    def takes_parts(self) -> bool:
        """See `LocalTarget`. Not with compiled modules, where each part would copy all constants."""
        return super().takes_parts and not compiled_modules(self._copies[0].module)

    def tables(self) -> dict[str, torch.Tensor]:
        """Live views [rows, dim] of the parameters and buffers, by table.

        Does not include maps of raw ids and quantised tables. Views of a `CompiledModule` are only valid until the
        next release.
        """
        places = self._copies[0].binding.places
        return {name: place.rows for name, place in places.items() if isinstance(place, Tensor)}

    def bound(self) -> frozenset[str]:
        """Names of the tables of the last release that have a place in the module."""
        return frozenset(self._copies[0].binding.places)

    def apply(self, release: Release) -> Written | None:
        """Write a release into the module. If this raises one of the errors below, nothing was written.

        Raises:
            NotFound: a table has no place in the module and is not left out; the message names all of them.
            Contradiction: a place has another shape or type than its table, or several tables; the module does not
                support a map of raw ids; the consumer's mode is `ids`; or this thread is inside `reading()`.
            TornTarget: an earlier release was only partly written, and this one does not replace everything.
        """
        release.check_values()
        if release.tables != self._followed:
            self._follow(release.tables)
        if (release.resync or release.whole) and not release.continues:
            self._warn_of_training()
        return super().apply(release)

    def _follow(self, tables: list[TableSpec]) -> None:
        """Bind the tables of the first release, or of a release with other tables than before."""
        types = value_types_of(tables)
        bindings = [each.bind(tables, self.bound(), types) for each in self._copies]
        binding, before = bindings[0], self._copies[0].binding
        # A table that is added or grows later may lack a place. The other tables must go on.
        rows = {table.name: table.rows for table in self._followed if table.name in self.bound()}
        unchanged = {table.name for table in tables if rows.get(table.name) == table.rows}
        if binding.problems and (not self._followed or unchanged & binding.problems.keys()):
            written = [table for table in tables if not self._leave_out.fits(table)]
            part = part_that_fits(self._copies[0].module, written, types)
            plain = all(name.isidentifier() for name in part.split("."))
            argument = part and (f"model.{part}" if plain else f"model.get_submodule({part!r})")
            _refuse(list(binding.problems.items()), argument)  # All problems, since one may explain another.
        if not self._followed:
            self._check_first(tables, binding)
        for name in binding.problems.keys() - before.problems.keys():
            logger.warning("not updated: %s", binding.problems[name])
        for each, bound in zip(self._copies, bindings, strict=True):
            each.follow(bound)
        self._followed = tables

    def _check_first(self, tables: list[TableSpec], binding: Binding) -> None:
        """Refuse a first release without the module's maps, and log parts that no table updates."""
        module = self._copies[0].module
        needed = missing_maps(module, binding)
        text = "the module maps raw ids by managed collision, and no table has the map {}: update the trainer"
        if missing := [name for name in needed if not self._leave_out.matches(name)]:
            _refuse([(name, NotFound(text.format(name))) for name in missing])
        names = [*(name for table in tables for name in table.names), *needed]
        patterns = self._leave_out.patterns
        if idle := [each for each in patterns if not any(fnmatchcase(name, each) for name in names)]:
            logger.warning("leave_out: no table matches %s", ", ".join(idle))
        left_out = bind(module, [table for table in tables if self._leave_out.fits(table)], types=list(ValueType))
        if stale := [name for name in binding.stale if name in left_out.stale]:
            logger.warning("no table updates these parts of the module: %s", ", ".join(stale))

    def _warn_of_training(self) -> None:
        """Warn about modules in training mode, whose forward may change tables."""
        training = [name for each in self._copies for name in in_training(each.module, each.binding)]
        if names := dict.fromkeys(training):
            logger.warning(
                "in training mode, where a forward may change synchronised values: %s; call eval()",
                ", ".join(name or "the module" for name in names),
            )


@dataclass(frozen=True, kw_only=True)
class ModuleReading(Reading):
    """A `Reading` of a module, or of its copy that is served now."""

    module: nn.Module


def _refuse(problems: list[tuple[str, DeltasyncError]], part: str = "") -> NoReturn:
    """Raise one error for all problems. If `part` is set, that part of the model has places for all tables."""
    kind = Contradiction if any(isinstance(each, Contradiction) for _, each in problems) else NotFound
    remedy = (
        f"all tables have places in a part of the module: TorchTarget({part})"
        if part
        else "use a module with places for them, restrict the consumer's tables, or leave them out: "
        "TorchTarget(module, leave_out=[...])"
    )
    raise kind(f"{_sentences(problems)}. Nothing was written: {remedy}")


def _sentences(problems: list[tuple[str, DeltasyncError]]) -> str:
    """The problems as sentences. Tables with the same problem share one. The number is limited."""
    tables: dict[str, list[str]] = {}
    for name, problem in problems:
        subject, colon, what = str(problem).partition(": ")
        of_one = colon and subject == f"table {name!r}"
        tables.setdefault(what if of_one else str(problem), []).extend([name] if of_one else [])
    sentences = [f"{_subject(names)}{what}" for what, names in tables.items()]
    more = [f"and {counted(len(sentences) - _SHOWN, 'other problem')}"] if len(sentences) > _SHOWN else []
    return "; ".join([*sentences[:_SHOWN], *more])


def _subject(names: list[str]) -> str:
    more = f" ... and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"table{'s' * (len(names) > 1)} {', '.join(map(repr, names[:_SHOWN]))}{more}: " if names else ""


class ModuleCopy:
    """A module and the places of the last release's tables in it."""

    def __init__(self, module: nn.Module, leave_out: "_LeaveOut") -> None:
        self.module = module
        self.binding = Binding({}, {}, [])
        self._leave_out = leave_out
        self._followed = False
        self._owners: dict[str, nn.Module] = {}
        self._early: dict[str, TablePlace | None] = {}

    def bind(self, tables: Iterable[TableSpec], before: Collection[str], types: Collection[ValueType]) -> Binding:
        """Find places for tables without using them yet: see `torch_binding.bind`."""
        return bind(self.module, [table for table in tables if not self._leave_out.fits(table)], before, types)

    def follow(self, binding: Binding) -> None:
        """Write releases to these places from now on."""
        self.binding, self._followed, self._early = binding, True, {}
        self._owners = {name: _owner_of(self.module, place) for name, place in binding.places.items()}

    def stage(self, release: Release) -> Callable[[], Written]:
        """See `Copy`."""
        for each in compiled_modules(self.module):
            each.discard()
        rows: dict[str, list[RowBatch]] = {table.name: [] for table in release.tables if release.resets(table)}
        for batch in release.rows:
            rows.setdefault(batch.table.name, []).append(batch)
        for place in self.binding.places.values():
            self._check_owner(place)
        writes = {
            table.name: self.binding.places[table.name].stage(rows[table.name], reset=release.resets(table))
            for table in release.tables
            if table.name in rows and table.name in self.binding.places
        }
        devices = accelerators(self.module)

        def write() -> Written:
            digests = dict[str, Iterator[RowDigests | None]]()
            # A module that was constructed in inference mode can only be written in inference mode.
            with torch.inference_mode():
                for device in devices:
                    torch.cuda.synchronize(device)  # Readers may have pending work on other streams.
                for name, write_table in writes.items():
                    digests[name] = iter(write_table() or ())
                for device in devices:
                    torch.cuda.synchronize(device)
            # Autocast caches casts of parameters until its outermost block ends, and readers may be inside one.
            torch.clear_autocast_cache()
            return Written([next(digests.get(rows.table.name, iter(())), None) for rows in release.rows])

        return write

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """See `Copy`."""
        place = self.binding.places.get(table.name) if self._followed else self._outlived(table)
        if place and self._followed:
            self._check_owner(place)
        # A place for the table before it grew does not count.
        return place.read(ids) if place and place.table == table else None

    def _check_owner(self, place: TablePlace) -> None:
        """Raise Contradiction if a place was replaced in the module. Tensors are looked up by name anyway."""
        name = place.table.name
        if not isinstance(place, Tensor) and _owner_of(self.module, place) is not self._owners[name]:
            raise Contradiction(
                f"table {name!r}: {place.name} was replaced in the module and can no longer be updated: pass the "
                "current module to a new target"
            )

    def _outlived(self, table: TableSpec) -> TablePlace | None:
        """The place of a table before the first release, when the module may already have rows."""
        if table.name not in self._early:
            self._early[table.name] = self.bind([table], (), list(ValueType)).places.get(table.name)
        return self._early[table.name]


def _owner_of(module: nn.Module, place: TablePlace) -> nn.Module:
    """The innermost module that contains a place."""
    for part in place.name.split("."):
        inner = getattr(module, part, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


@dataclass(frozen=True)
class _LeaveOut:
    """Patterns for the names of tables that are not written."""

    patterns: tuple[str, ...]

    def fits(self, table: TableSpec) -> bool:
        """Whether all names of a table match, or the name of the table that it belongs to."""
        return all(map(self.matches, table.names)) or bool(table.of and self.matches(table.of))

    def matches(self, name: str) -> bool:
        """Whether a name matches a pattern."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def copy_of(module: nn.Module) -> nn.Module:
    """Copy a module without sharing memory; a Contradiction if that is impossible.

    Tensors that share memory in the module must share it in the copy, too.
    """
    try:
        made = copy.deepcopy(module, _memo(module))
    except Exception as error:
        raise _no_copy(f"{type(error).__name__}: {error}") from error
    tensors, copies = all_tensors(module), all_tensors(made)
    if tensors.keys() != copies.keys():
        raise _no_copy(f"its copy has other tensors: {sorted(tensors.keys() ^ copies.keys())}")
    storages, owners = {_storage(each) for each in tensors.values()}, dict[int, int]()
    for name, tensor in copies.items():
        if _storage(tensor) and _storage(tensor) in storages:
            raise _no_copy(f"its copy shares {name} with it")
        if owners.setdefault(_storage(tensors[name]), _storage(tensor)) != _storage(tensor):
            raise _no_copy(f"{name} shares memory with another of its tensors, but not in a copy")
    return made


def _memo(module: nn.Module) -> dict[int, Any]:
    """Copies of tensors that `deepcopy` cannot copy: sharded tensors without a process group."""
    memo: dict[int, Any] = {}
    for each in all_tensors(module).values():
        if isinstance(each, ShardedTensorBase) and not hasattr(each, "_process_group"):
            memo[id(each)] = ShardedTensorBase._init_from_local_shards_and_global_metadata(
                copy.deepcopy(each.local_shards(), memo), copy.deepcopy(each.metadata(), memo)
            )
    return memo


def _no_copy(why: str) -> Contradiction:
    return Contradiction(
        f'reads="copies": the module cannot be copied: {why}. Use reads="pause", or another module'
    )


def all_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a module, also in plain attributes, as in quantised collections."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            todo.extend((f"{name}.{key}", each) for key, each in _wrapped(value).items())
        elif id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{name}.{key}".lstrip("."), each) for key, each in _parts(value))
    return tensors


def _wrapped(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside a wrapper tensor: TorchRec's for 4 bits, or torch's for several shards."""
    if isinstance(tensor, ShardedTensorBase):
        return {str(number): shard.tensor for number, shard in enumerate(tensor.local_shards())}
    names = [*getattr(type(tensor), "__slots__", ()), *vars(tensor)]
    inner = {name: getattr(tensor, name, None) for name in names}
    return {name: each for name, each in inner.items() if isinstance(each, torch.Tensor)}


def _parts(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, nn.Module):
        yield from [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        yield from value.named_children()
        yield from ((key, each) for key, each in vars(value).items() if key not in _OWN)
    elif isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def _storage(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none of its own."""
    if isinstance(tensor, ShardedTensorBase):
        return 0
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # The tensor wraps others.
        return 0
