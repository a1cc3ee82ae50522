"""Training with what is done ahead, compared with training without a pipeline."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from tests.integration.trainer.pipelines.prepared import rich
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Training, through
from tests.integration.trainer.tracking.rows import Rows, differing
from torch import nn
from torchrec.distributed.model_parallel import get_unwrapped_module

from deltasync.base.errors import Contradiction
from deltasync.trainer.pipelines import accept_tensordicts

BATCHES = 6


class _Reasons(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name, reason = record.args  # type: ignore[misc]
        assert record.getMessage() == f"module {name!r} is not pipelined: {reason}"
        self.reasons[str(name)] = str(reason)


@contextmanager
def told() -> Iterator[dict[str, str]]:
    """What is logged meanwhile: the names of modules that are not pipelined, and why."""
    handler, logger = _Reasons(), logging.getLogger("deltasync.trainer.pipelines")
    logger.addHandler(handler)
    try:
        yield handler.reasons
    finally:
        logger.removeHandler(handler)


def check_like_plain(
    make: Callable[[], nn.Module],
    *,
    ahead: Mapping[str, int] | None = None,
    refused: Mapping[str, str] | None = None,
    batches: Callable[[int], Iterable[Any]] = rich,
    **options: Any,
) -> None:
    """A pipeline trains bit by bit as a plain loop, and leaves the model as one does.

    Args:
        make: the model, anew.
        ahead: how many calls of each module are made ahead of each forward, from the first on; a module counts
            its `calls`.
        refused: modules that are not pipelined, and a pattern of the reason that is logged for each.
        batches: the number of batches, the same each time.
        options: of the pipeline.
    """
    plain, pipelined = Training(make(), BOTH_RANKS), Training(make(), BOTH_RANKS)
    accept_tensordicts(plain.model)  # Pipelines do, for good.
    expected = plain.plainly(batches(BATCHES))
    pipeline, iterator = pipelined.pipeline(**options), iter(batches(BATCHES))
    with told() as reasons:
        outputs = [pipeline.progress(iterator) for _ in range(2)]
        assert list(pipelined.model.state_dict()) == list(plain.model.state_dict())
        calls = calls_of(pipelined.model)
        outputs += through(pipeline, iterator)
    pipeline.detach()
    assert outputs == expected
    check_same(pipelined.held(), plain.held())
    check_reasons(reasons, refused or {})
    assert attributes(pipelined.model) == attributes(plain.model)
    if ahead is not None:
        per_forward = {name: count // BATCHES for name, count in calls_of(plain.model).items()}
        made_ahead = {name: count - 2 * per_forward[name] for name, count in calls.items()}
        assert made_ahead == dict.fromkeys(calls, 0) | dict(ahead)


def check_noticed_later(make: Callable[[], nn.Module], name: str, *needing: str) -> None:
    """An error tells what other ranks have not been told in time; once it is heeded, all is well."""
    with pytest.raises(Contradiction, match=r"it cannot be pipelined: name it in PipelineOptions\.not_ahead"):
        Training(make(), BOTH_RANKS).pipelined(rich(BATCHES))
    reasons = dict.fromkeys((name, *needing), "it is named in not_ahead")
    check_like_plain(make, refused=reasons, not_ahead=[name])


def check_reasons(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    assert found.keys() == expected.keys(), found
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), found


def check_same(some: Rows, others: Rows) -> None:
    """Bit by bit."""
    assert some.keys() == others.keys()
    assert not {name: rows for name in some if (rows := differing(some[name], others[name]))}


def calls_of(model: nn.Module) -> dict[str, int]:
    """How often modules that count that have been called."""
    modules = get_unwrapped_module(model).named_modules()
    return {name: module.calls for name, module in modules if hasattr(module, "calls")}


def attributes(model: nn.Module) -> dict[str, Any]:
    """The names of all that modules have, of those too that sharded ones keep out of sight."""
    found = {}
    for name, module in model.named_modules():
        found[name] = sorted(vars(module)), getattr(module, "is_pipelined", None)
        for number, dist in enumerate(getattr(module, "_input_dists", ())):
            parts = dist.named_modules(prefix=f"{name}:{number}")
            found |= {part: (sorted(vars(m)), None) for part, m in parts}
    return found
