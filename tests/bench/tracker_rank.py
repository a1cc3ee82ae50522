"""The rank of the tracker benchmark, under torchrun: what recording and reading cost, and what is held.

Both trackers watch the same model train on the same batches; only the time within their own functions counts.
"""

import json
import logging
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from tests.bench.tracker_model import DIM, Training, batches
from tests.bench.tracker_pair import TrackerPair
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.distributed.ranks import join_ranks
from deltasync.trainer.tracking.modes import TrackingMode

MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)
ROWS, IDS, STEPS_PER_READ = 10_000_000, 200_000, 20
# The exponents that fit MovieTweetings best: 0.89 for how often films are rated, 0.70 for how often users rate.
SKEWS = {0.9: 5, 0.7: 3}
"""Windows to measure, by skew."""
SMALL_ROWS, SMALL_IDS, SMALL_STEPS = 100_000, 2_000, 1_000


@dataclass(frozen=True)
class Window:
    """Some steps and a read."""

    mode: str
    skew: float
    rows: int
    ours_seconds: float
    theirs_seconds: float


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(json_file: Path) -> None:
    """Measure, and write the figures."""
    logging.basicConfig(level=logging.WARNING)
    device = join_ranks()
    windows = list(_windows(device))
    figures = {
        "rows": ROWS,
        "dim": DIM,
        "ids_per_step": IDS,
        "steps_per_read": STEPS_PER_READ,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "recording": [_summary(windows, mode, skew) for skew in SKEWS for mode in MODES],
        "windows": [asdict(window) for window in windows],
        "memory": [_memory(mode, device) for mode in MODES],
    }
    json_file.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _windows(device: torch.device) -> Iterator[Window]:
    training = Training(ROWS, device)
    pairs = [TrackerPair(training, mode, ["reader"]) for mode in MODES]
    for skew, count in SKEWS.items():
        stream = batches(ROWS, IDS, skew, device)
        for number in range(count + 1):
            windows = _window(training, pairs, list(islice(stream, STEPS_PER_READ)), skew, number)
            if number:  # The first meets pages that were never touched.
                yield from windows


def _window(
    training: Training, pairs: list[TrackerPair], some: list[KeyedJaggedTensor], skew: float, number: int
) -> list[Window]:
    before = [(pair.ours.seconds, pair.theirs.seconds) for pair in pairs]
    for batch in some:
        _step(training, pairs, batch)
    windows = []
    for pair, (ours, theirs) in zip(pairs, before, strict=True):
        rows = pair.read("reader", ours_first=number % 2 == 0)
        seconds = pair.ours.seconds - ours, pair.theirs.seconds - theirs
        windows.append(Window(pair.mode.value, skew, rows, *seconds))
    return windows


def _step(training: Training, pairs: list[TrackerPair], batch: KeyedJaggedTensor) -> None:
    for pair in pairs:
        pair.theirs.begin_step()
    training.step(batch)
    for pair in pairs:
        pair.ours.end_step()


def _summary(windows: list[Window], mode: TrackingMode, skew: float) -> dict[str, Any]:
    mine = [window for window in windows if (window.mode, window.skew) == (mode.value, skew)]
    return {
        "mode": mode.value,
        "skew": skew,
        "windows": len(mine),
        "rows_read": statistics.median(window.rows for window in mine),
        "ours_seconds": statistics.median(window.ours_seconds for window in mine),
        "theirs_seconds": statistics.median(window.theirs_seconds for window in mine),
        "time_ratio": statistics.median(window.ours_seconds / window.theirs_seconds for window in mine),
    }


def _memory(mode: TrackingMode, device: torch.device) -> dict[str, Any]:
    """Bytes held at the start and at the end, with a consumer that never reads beside one that does."""
    training = Training(SMALL_ROWS, device)
    pair = TrackerPair(training, mode, ["reader", "absent"])
    stream = batches(SMALL_ROWS, SMALL_IDS, next(iter(SKEWS)), device)
    ours_at_start = pair.ours.nbytes
    for number, batch in enumerate(islice(stream, SMALL_STEPS), 1):
        _step(training, [pair], batch)
        if number % STEPS_PER_READ == 0:
            pair.read("reader")
    return {
        "mode": mode.value,
        "rows": SMALL_ROWS,
        "steps": SMALL_STEPS,
        "ids_per_step": SMALL_IDS,
        "ours_bytes_at_start": ours_at_start,
        "ours_bytes": pair.ours.nbytes,
        "theirs_bytes": pair.theirs.nbytes,
    }


if __name__ == "__main__":
    main()
