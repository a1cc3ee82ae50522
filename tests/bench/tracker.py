"""Our tracker beside TorchRec's, and a step with ours against one without."""

import json
from typing import Any

from rich.console import Console
from tests.bench.children import Children
from tests.bench.timing import ratio_of

RANKS = 2
_ROUNDS = 80
_STEP_RATIOS = {"time": "step", "cpu": "cpu", "thread": "thread"}
_AIMS = {"id_only": 0.12, "embedding": 0.04}
_STEP_AIM = 1.015


def run(console: Console) -> dict[str, Any]:
    with Children() as children:
        found = children.processes.folder / "tracker.json"
        children.run_ranks(1, "tests.bench.tracker_rank", ["--json", str(found)])
        figures: dict[str, Any] = json.loads(found.read_text())
        found = children.processes.folder / "steps.json"
        options = ["--rounds", str(_ROUNDS), "--json", str(found)]
        children.run_ranks(RANKS, "tests.bench.step_time_ranks", options)
        steps: dict[str, Any] = json.loads(found.read_text())
    _print_recording(console, figures)
    _print_steps(console, steps)
    ids, embeddings = (line["time_ratio"] for line in figures["recording"][:2])
    ratios = {"ids_time_ratio": ids, "embeddings_time_ratio": embeddings}
    ratios |= {f"step_{name}_ratio": steps[f"tracking_{kind}_ratio"] for name, kind in _STEP_RATIOS.items()}
    return ratios | figures | {"steps": steps}


def _print_recording(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"tracker: {figures['steps_per_read']} steps of {figures['ids_per_step']:,} ids and a read, "
        f"{figures['rows']:,} rows x {figures['dim']} fp32, {figures['device']}, threads: {figures['threads']}"
    )
    console.print("  mode        skew   rows read      ours    TorchRec's   ratio")
    for number, line in enumerate(figures["recording"]):
        aim = f"   (aim: at most {_AIMS[line['mode']]})" if number < len(_AIMS) else ""
        console.print(
            f"  {line['mode']:<10}  {line['skew']:>4}  {line['rows_read']:>10,}  {line['ours_seconds']:>6.3f} s  "
            f"{line['theirs_seconds']:>10.3f} s  {line['time_ratio']:>6.3f}{aim}"
        )


def _print_steps(console: Console, steps: dict[str, Any]) -> None:
    console.print(
        f"  step of the demo's model on {RANKS} ranks, tracked against not: "
        f"{ratio_of(steps, 'tracking_step_ratio')}, {steps['rounds']} rounds of {steps['off_ms']:.1f} ms steps"
    )
    off = f"{steps['off_cpu_ms']:.2f} ms without"
    console.print(
        f"  CPU time of a rank      {ratio_of(steps, 'tracking_cpu_ratio')}   ({off}; aim: at most {_STEP_AIM})"
    )
    thread = ratio_of(steps, "tracking_thread_ratio")
    console.print(f"  of its training thread  {thread}   (aim: at most {_STEP_AIM})")
