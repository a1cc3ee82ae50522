"""`python -m tests.bench`, which `make bench` runs."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from deltasync.cli.config import CONTEXT


def _list(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo("\n".join(bench.commands))
        ctx.exit()


@click.group()
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the names.")
def bench() -> None:
    """Measure on this machine, as ratios in one run."""


class _Benchmark(click.Command):
    """A benchmark, whose module is imported when it is used: many import torch.

    The module has `run`, and where it takes options, `OPTIONS`, each of which adds some to a command.
    """

    def __init__(self, name: str, module: str, says: str) -> None:
        super().__init__(name, help=says)
        self._module = module

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """See `click.Command`: the context is that of the command with its options."""
        module = import_module(f"tests.bench.{self._module}")
        command = _measure(module.run)
        for option in reversed(getattr(module, "OPTIONS", ())):
            command = option(command)
        whole = click.command(self.name, help=self.help, context_settings=CONTEXT)(command)
        return whole.make_context(*args, **kwargs)


def _measure(run: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    @click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
    )
    def measure(json_file: Path | None, **settings: Any) -> None:
        from rich.console import Console

        figures = run(Console(soft_wrap=True, highlight=False), **settings)
        if json_file:
            json_file.write_text(json.dumps(figures, indent=2) + "\n")

    return measure


def _add(name: str, says: str, module: str | None = None) -> None:
    bench.add_command(_Benchmark(name, module or name, says))


_add(
    "publish",
    "Throughput from a trainer's publish to a replica's rows, and CPU time of the service, against a bare path.",
)
_add("tls", "Throughput from a trainer's publish to a replica's rows with mutual TLS, over that without.")
_add(
    "freshness",
    "Time from a trainer's publish of a small cut to a replica's rows, against two bare gRPC hops and one write.",
)
_add("failover", "Time until the next cut is sealed after the owner of a model was killed, or has given it away.")
_add("release", "Time of a release by a consumer's policy, against NumPy's gathers and norms of the same rows.")
_add("apply", "Time to apply changed rows, in the service and in a replica, against a bare NumPy scatter.")
_add(
    "restart",
    "Bytes that a trainer publishes which restarts behind what is published, over those of the rows it lacks.",
)
_add("scale", "Time of a cut into a large table, and of a consumer's status, against the same with a small table.")
_add(
    "checkpoint",
    "Time of a cut while a checkpoint is written, bytes that checkpoints write, and time to load one.",
)
_add(
    "versions",
    "Bytes of a rollback, over those that differ; time of cuts while versions are kept, against without.",
)
_add("serve", "Lookups of a quantised predictor while its rows are replaced, against the same without updates.")
_add("shared", "Lookups and memory of workers over one mirror while its rows change, against private copies.")
_add("quality", "AUC of replicas with different policies, and the bytes each is sent.")
_add(
    "consumers",
    "CPU time of the service for eight consumers with different policies, against lines of NumPy.",
)
_add("tracker", "Time of the tracker beside TorchRec's, and step time with it against without.")
_add(
    "pipelines",
    "Step time of training pipelines: TorchRec's, and ours with KeyedJaggedTensors and with TensorDicts.",
    "pipelines.run",
)


if __name__ == "__main__":
    bench()
