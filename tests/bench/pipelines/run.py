"""Step time of `OnlinePipeline`, with KeyedJaggedTensors and with TensorDicts, and of TorchRec's pipeline."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from tests.bench.children import Children
from tests.bench.pipelines.options import Sizes, pipelines_options
from tests.bench.timing import ratio_of

OPTIONS = (pipelines_options,)
_AIMS = {"pipeline": "TorchRec's (aim: at most 1.0)", "tensordict": "KeyedJaggedTensors (aim: at most 1.02)"}


def run(console: Console, **settings: Any) -> dict[str, Any]:
    sizes = Sizes(**settings)
    with Children() as children:
        found = children.processes.folder / "pipelines.json"
        children.run_ranks(sizes.ranks, "tests.bench.pipelines.rank", [*sizes.arguments(), "--json", str(found)])
        figures: dict[str, Any] = json.loads(found.read_text()) | {"sizes": asdict(sizes)}
    console.print(
        f"pipelines: {sizes.ranks} ranks ({figures['device']}), batches of {sizes.batch_size}, "
        f"{sizes.tables} tables x {sizes.rows:,} rows x {sizes.dim} fp32, {sizes.ids} ids each, "
        f"dense {sizes.dense}, over {sizes.over}; median of {sizes.rounds} rounds of {sizes.steps} steps"
    )
    for name, line in figures["variants"].items():
        console.print(f"  {name:<12} {line['step_ms']:>7.1f} ms")
    for name, against in _AIMS.items():
        console.print(f"  {name:<12} {ratio_of(figures, f'{name}_step_ratio')} to {against}")
    return figures
