"""Starts on all ranks: all of them succeed, or all raise the same error."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np

from deltasync.base import errors
from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.base.events import error_text
from deltasync.trainer.distributed.rank_store import RankStore, named


@contextmanager
def begun_together(
    what: str, options: Mapping[str, Any] | None = None, ranks: Sequence[int] | None = None
) -> Iterator[None]:
    """Raise the same error on all ranks if one fails in the block or has other options.

    All ranks enter the block, and wait for each other at its end.

    Args:
        what: what the ranks start, in messages.
        options: the options that must be equal on all ranks.
        ranks: the ranks that take part; None = all.

    Raises:
        InvalidInput: ranks have different options. The message names the options, their values and the ranks.
        DeltasyncError: a rank has failed. The message names the rank. The class is that of the rank's error if it
            is one of deltasync's errors.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # all ranks raise it below
        failure = error
    store = RankStore(what, ranks)
    if len(store.ranks) == 1:
        if failure:
            raise failure
        return
    shown = {name: _shown(value) for name, value in (options or {}).items()}
    reason = [type(failure).__name__, error_text(failure)] if failure else None
    store.write(json.dumps([shown, reason]))
    store.wait_for_all()
    states = [json.loads(text) for text in store.read()]
    if refusal := _error_of_all(what, store.ranks, states):
        store.leave()  # Now each rank may end.
        raise refusal from failure


def _error_of_all(what: str, ranks: Sequence[int], states: Sequence[Any]) -> DeltasyncError | None:
    """The error that all ranks raise, from the options and the failure of each; None if there is none."""
    if differing := _differing(ranks, [options for options, _ in states]):
        return InvalidInput(f"{what}: {differing}; all ranks need the same")
    reasons = _by_value(ranks, [reason and tuple(reason) for _, reason in states])
    if not reasons:
        return None
    (kind, _), *_ = reasons
    return _error(kind)("; ".join(f"{named(of)}: {text}" for (_, text), of in reasons.items()))


def _differing(ranks: Sequence[int], options: Sequence[Mapping[str, str]]) -> str:
    """The differing options with their values and ranks, as text; empty if there are none."""
    names = {name: None for of_rank in options for name in of_rank}
    values = {name: _by_value(ranks, [of_rank.get(name, "missing") for of_rank in options]) for name in names}
    return "; ".join(
        f"{name} is " + ", ".join(f"{value} on {named(of)}" for value, of in by_value.items())
        for name, by_value in values.items()
        if len(by_value) > 1
    )


def _by_value(ranks: Sequence[int], values: Sequence[Any]) -> dict[Any, list[int]]:
    """The ranks by value, except those with None."""
    by_value = defaultdict[Any, list[int]](list)
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            by_value[value].append(rank)
    return by_value


def _shown(value: Any) -> str:
    """The value of an option as text; equal values give equal texts."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, AbstractSet | tuple):
        value = sorted(value) if isinstance(value, AbstractSet) else list(value)
    return repr(value)


def _error(name: str) -> type[DeltasyncError]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, DeltasyncError) else DeltasyncError
