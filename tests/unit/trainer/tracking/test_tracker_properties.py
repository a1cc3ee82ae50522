"""Random interleavings of all that can be done to a tracker, against a plain model of sets.

The tables are embeddings of a plain module, which the tracker compares; lookups on ranks are in
tests/integration/trainer/tracking/test_tracker_model.py.
"""

from collections.abc import Sequence
from unittest import mock

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.embeddings import embedding
from tests.support.side_by_side import Operation, SideBySide, operations
from torch import nn

from deltasync.trainer.tracking import TrackerOptions, TrackingMode

NAMES = ("a", "a", "b")
MODES = (TrackingMode.EMBEDDING, TrackingMode.EMBEDDING_LAST, TrackingMode.ID_ONLY)
# Few, so that rows often become what they were; some compare oddly.
VALUES = (0.0, 0.0, 1.0, -0.0, -2.5, 1e-6, float("nan"), float("inf"))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tall = embedding(torch.zeros(3, 2))
        self.short = embedding(torch.zeros(2, 1, dtype=torch.float16))
        self.single = embedding(torch.zeros(1, 2))


class Written(SideBySide):
    """Rows are written to directly."""

    def write(self, writes: Sequence[tuple[int, int, float]]) -> None:
        for number, row, value in writes:
            weight = self.tracker.tables[number].shards[0].weight
            weight[row % len(weight), -1] = value


NAME, TABLE, ROW = st.sampled_from(NAMES), st.integers(0, 2), st.integers(0, 2)
WRITES = st.lists(st.tuples(TABLE, ROW, st.sampled_from(VALUES)), min_size=1, max_size=5)
OFTEN = [
    *2 * [operations("write", WRITES)],
    *4 * [operations("read", NAME)],
    *3 * [operations("acknowledge", st.sampled_from((0, 0, 1, 2)))],
    operations("delete", TABLE, st.lists(ROW, max_size=2)),
]
SELDOM = [
    operations("acknowledge", st.integers(0, 20)),
    operations("read_ids", NAME),
    operations("end_step"),
    operations("mark", TABLE, st.lists(ROW, max_size=3)),
    operations("mark_all", st.none() | TABLE),
    operations("add", NAME, st.sampled_from(MODES)),
    operations("add", st.just("c"), st.sampled_from(MODES)),
    operations("remove", NAME),
    operations("resync", NAME),
]
COUNTED = [*2 * [operations("count", NAME)], *2 * [operations("read_begun", NAME)]]
CHECKPOINTS = [*2 * [operations("reload")], operations("save"), operations("restore")]


def run(
    program: Sequence[Operation],
    mode: TrackingMode = TrackingMode.EMBEDDING,
    *,
    device: torch.device | None = None,
) -> None:
    options = TrackerOptions(consumers=["a", "b"], mode=mode, dense=True)
    Written(Tables().to(device), options).run(program)


def programs(*kinds: st.SearchStrategy[Operation]) -> st.SearchStrategy[list[Operation]]:
    # Left to itself, hypothesis would draw five on average.
    return st.integers(0, 25).flatmap(lambda size: st.lists(st.one_of(*kinds), min_size=size, max_size=size))


@given(programs(*OFTEN))
def test_reads_and_acknowledgements(program: list[Operation]) -> None:
    run(program)


# A consumer that cannot be added for its name changes nothing: nor is what was written until then noted.
_REFUSED = [
    Operation("add", ("c", TrackingMode.EMBEDDING)),
    Operation("write", ([(0, 0, 1.0)],)),
    Operation("add", ("c", TrackingMode.EMBEDDING)),
    Operation("write", ([(0, 0, 0.0)],)),
]


@given(programs(*OFTEN, *SELDOM))
@example(_REFUSED)
def test_all_there_is(program: list[Operation]) -> None:
    run(program)


@given(programs(*OFTEN, *CHECKPOINTS))
def test_checkpoints(program: list[Operation]) -> None:
    run(program)


@given(programs(*OFTEN, *SELDOM, *CHECKPOINTS), st.sampled_from(MODES))
def test_without_first_values(program: list[Operation], mode: TrackingMode) -> None:
    run(program, mode)


@given(programs(*OFTEN, *SELDOM, *CHECKPOINTS, *COUNTED), st.sampled_from(MODES))
def test_launched_reads_are_those_that_are_waited_for(program: list[Operation], mode: TrackingMode) -> None:
    run(program, mode)


@given(programs(*OFTEN, *SELDOM))
def test_memory_of_reads_is_reused(program: list[Operation]) -> None:
    spare = mock.patch.object(Written, "bytes_under_way", 10_000)
    with mock.patch("deltasync.trainer.tracking.delta._LARGE_BYTES", 0), spare:
        run(program)
