"""The figures of the pipeline benchmark, from what its turns took."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tests.bench.pipelines.options import ratio_name
from tests.bench.pipelines.variants import VARIANTS
from tests.bench.timing import Duration, spread_of


class Turn(NamedTuple):
    """Some steps of a variant."""

    step: Duration
    laps: list[float]


# The turns of each, by variant.
Rounds = Sequence[Mapping[str, Turn]]


def figures(rounds: Rounds, memory: Mapping[str, tuple[int, int]], losses: Mapping[str, float]) -> dict[str, Any]:
    """Medians over rounds, and where they lie with a probability of 95 %."""
    variants: dict[str, dict[str, Any]] = {
        name: _step_times(rounds, name) | _peak(*memory[name]) | {"loss": loss, "against": VARIANTS[name].against}
        for name, loss in losses.items()
    }
    ratios = [_ratios(rounds, name, other) for name in losses if (other := VARIANTS[name].against)]
    return dict(ChainMap(*ratios)) | {"variants": variants}


def _step_times(rounds: Rounds, name: str) -> dict[str, float]:
    times = sorted(1e3 * one[name].step.seconds for one in rounds)
    p50, p90 = np.percentile([1e3 * lap for one in rounds for lap in one[name].laps], (50, 90)).tolist()
    ends = {"step_ms_min": times[0], "step_ms_max": times[-1]}
    return spread_of("step_ms", times) | ends | {"p50_ms": p50, "p90_ms": p90}


def _ratios(rounds: Rounds, name: str, other: str) -> dict[str, float]:
    pairs = [(one[name].step, one[other].step) for one in rounds]
    steps = sorted(mine.seconds / its.seconds for mine, its in pairs)
    cores = sorted(mine.cpu_seconds / its.cpu_seconds for mine, its in pairs)
    ratio = ratio_name(name)
    return spread_of(f"{ratio}_step_ratio", steps) | spread_of(f"{ratio}_cpu_ratio", cores)


def _peak(held: int, rise: int) -> dict[str, int]:
    return {"peak_bytes": held + rise, "held_bytes": held}
