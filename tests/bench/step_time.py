"""Step time of the demo's model with tracking, and with publishing, against neither."""

import json
from typing import Any

from rich.console import Console

from tests.bench.children import Children

RANKS = 2
_ROUNDS = 25


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with Children() as children:
        figures = step_times(children, _ROUNDS, "--service", children.service().grpc)
    console.print(f"tracking: the demo's model on {RANKS} ranks, median of {figures['rounds']} rounds")
    console.print(f"  step without tracking   {figures['off_ms']:.2f} ms")
    console.print(f"  with tracking           {ratio_of(figures, 'tracking_step_ratio')}")
    print_cpu(console, figures)
    console.print(f"  of the trainer's thread, in the tracker: {figures['tracker_share']:.2%} of the step")
    publishing = ratio_of(figures, "publishing_step_ratio")
    console.print(f"  with publishing too     {publishing}   (service on the same cores)")
    return figures


def step_times(children: Children, rounds: int, *arguments: str) -> dict[str, Any]:
    """What `step_time_ranks` measures, on ranks of its own."""
    found = children.processes.folder / "steps.json"
    options = ["--rounds", str(rounds), "--json", str(found), *arguments]
    children.run_ranks(RANKS, "tests.bench.step_time_ranks", options)
    figures: dict[str, Any] = json.loads(found.read_text())
    return figures


def ratio_of(figures: dict[str, Any], name: str) -> str:
    """A ratio and its uncertainty, to print."""
    return f"ratio {figures[name]:.3f} ({figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f})"


def print_cpu(console: Console, figures: dict[str, Any]) -> None:
    """Print how much more CPU time a step with tracking takes."""
    off = f"{figures['off_cpu_ms']:.2f} ms without"
    console.print(
        f"  CPU time of a rank      {ratio_of(figures, 'tracking_cpu_ratio')}   ({off}; aim: at most 1.01)"
    )
    console.print(f"  of its training thread  {ratio_of(figures, 'tracking_thread_ratio')}   (aim: at most 1.01)")
