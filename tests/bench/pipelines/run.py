"""Step time and memory of the training pipelines: TorchRec's, and ours with each of its options."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from tests.bench.children import Children
from tests.bench.pipelines.options import NAMES, Sizes, pipelines_options, ratio_name, variant_arguments
from tests.bench.timing import ratio_of

OPTIONS = (pipelines_options,)


def run(console: Console, variants: Sequence[str] = (), **settings: Any) -> dict[str, Any]:
    sizes = Sizes(**settings)
    with Children() as children:
        found = children.processes.folder / "pipelines.json"
        arguments = [*sizes.arguments(), *variant_arguments(variants), "--service", children.service().grpc]
        children.run_ranks(sizes.ranks, "tests.bench.pipelines.rank", [*arguments, "--json", str(found)])
        figures: dict[str, Any] = json.loads(found.read_text()) | {"sizes": asdict(sizes)}
    _print_sizes(console, sizes, figures)
    _print_variants(console, figures)
    _print_aims(console, figures)
    return figures


def _print_sizes(console: Console, sizes: Sizes, figures: dict[str, Any]) -> None:
    console.print(
        f"pipelines: {sizes.ranks} ranks ({figures['device']}), batches of {sizes.batch_size}, "
        f"{sizes.tables} tables x {sizes.rows:,} rows x {sizes.dim} fp32, {sizes.ids} ids each, "
        f"dense {sizes.dense}, over {sizes.over}; median of {sizes.rounds} rounds of {sizes.steps} steps"
    )


def _print_variants(console: Console, figures: dict[str, Any]) -> None:
    console.print(f"{'':<38}   step    P50    P90 ms   peak memory   step against")
    for name, line in figures["variants"].items():
        times = "".join(f"{line[key]:>7.1f}" for key in ("step_ms", "p50_ms", "p90_ms"))
        ratio = f"{ratio_name(name)}_step_ratio"
        against = f"{ratio_of(figures, ratio)} to {NAMES[line['against']]}" if line["against"] else ""
        console.print(f"  {NAMES[name]:<36}{times}     {line['peak_bytes'] / 1e6:>8.1f} MB   {against}")
    for name, why in figures["not_measured"].items():
        console.print(f"  {NAMES.get(name, name):<36}  not measured: {why}")


def _print_aims(console: Console, figures: dict[str, Any]) -> None:
    for name, aim in (("pipeline", "1.0"), ("tensordict", "1.02")):
        if (ratio := f"{name}_step_ratio") in figures:
            console.print(f"  {name:<10}  {ratio_of(figures, ratio)}   (aim: at most {aim})")
    console.print(
        f"  memory: {figures['memory_source']}, of one rank; load of the machine: {figures['load_average']:.1f} "
        f"on {figures['cores']} cores"
    )
