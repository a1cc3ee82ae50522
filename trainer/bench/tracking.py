"""Step time of the demo's model with tracking, and with publishing, against neither."""

import json
from typing import Any

from rich.console import Console

from trainer.bench.children import Children

RANKS = 2


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures."""
    with Children() as children:
        service = children.service()
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        found = children.processes.folder / "tracking.json"
        arguments = ["--service", service.grpc, "--json", str(found)]
        children.processes.start("trainer", [*torchrun, "-m", "trainer.bench.tracking_ranks", *arguments])
        children.processes.wait("trainer")
        figures: dict[str, Any] = json.loads(found.read_text())
    console.print(f"tracking: the demo's model on {RANKS} ranks, median of {figures['rounds']} rounds")
    console.print(f"  step without tracking   {figures['off_ms']:.2f} ms")
    console.print(f"  with tracking           ratio {figures['tracking_step_ratio']:.3f}   (aim: at most 1.03)")
    console.print(f"  of the trainer's thread, in the tracker: {figures['tracker_share']:.2%} of the step")
    console.print(
        f"  with publishing too     ratio {figures['publishing_step_ratio']:.3f}   (service on the same cores)"
    )
    return figures
