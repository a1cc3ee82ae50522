"""What the service takes for 200 consumers with policies against one, and for 2,000 tables against 20.

There are as many rows in both.
Each has a service of its own, and they take turns, as in `consumers.py`. What is compared is the CPU time of the
service per version. A consumer's policy is top-k 10 %, in int8.
"""

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from deltasync.client import Policy, TableSpec
from tests.bench.consumers import ONE, running_fleet
from tests.bench.timing import spread_of

CONSUMERS, ROUNDS = 200, 3
_WARM_UP = 1
_PER_PROCESS = 50
_EVERYTHING = {"everything": Policy()}


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures."""
    (policy,) = ONE.values()
    consumers = {
        "few": (ONE, _tables(2, 20_000)),
        "many": ({f"consumer-{number}": policy for number in range(CONSUMERS)}, _tables(2, 20_000)),
    }
    plain = {"few": (_EVERYTHING, _tables(20, 4_000)), "many": (_EVERYTHING, _tables(2_000, 40))}
    ranked = {"few": (ONE, _tables(20, 4_000)), "many": (ONE, _tables(2_000, 40))}
    figures = {
        **_figures("consumers", consumers),
        **_figures("tables", plain),
        **_figures("tables_topk", ranked),
    }
    for name, says in (
        ("consumers", f"{CONSUMERS} consumers with top-k against one"),
        ("tables", "2,000 tables against 20, one consumer without a policy"),
        ("tables_topk", "2,000 tables against 20, one consumer with top-k"),
    ):
        milliseconds = " against ".join(
            f"{1e3 * figures[f'{name}_{each}_cpu_seconds']:.1f}" for each in ("many", "few")
        )
        console.print(
            f"many: {says}: ratio {figures[f'{name}_cpu_ratio']:.1f}, {milliseconds} ms of CPU per version"
        )
    return figures


def _tables(count: int, rows: int) -> list[TableSpec]:
    return [TableSpec(f"table-{number}", rows, 16) for number in range(count)]


def _figures(name: str, fleets: Mapping[str, tuple[Mapping[str, Policy], list[TableSpec]]]) -> dict[str, float]:
    """CPU time of the service per version with many, against that with few."""
    with ExitStack() as stack:
        running = [stack.enter_context(running_fleet(*each, _PER_PROCESS)) for each in fleets.values()]
        for number in range(_WARM_UP + ROUNDS):
            for fleet in running:
                fleet.turn(counted=number >= _WARM_UP)
        few, many = (fleet.cpu_per_version()[_WARM_UP:] for fleet in running)
    return {
        **spread_of(f"{name}_cpu_ratio", [b / a for a, b in zip(few, many, strict=True)]),
        f"{name}_few_cpu_seconds": statistics.median(few),
        f"{name}_many_cpu_seconds": statistics.median(many),
    }
