"""What a soak has found, as a dictionary and for a person."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.soak.fleet import CLICKS, Fleet
from tests.soak.journal import of_pasts, read_journal
from tests.soak.leftovers import tracebacks
from tests.soak.play import Player
from tests.soak.rank import journal_file
from tests.soak.recovery import Happened, Receipts, Recovery, recovery, steps_back
from tests.soak.replica import replica_journal
from tests.soak.schedule import SoakOptions
from tests.soak.verdict import twice_acknowledged
from tests.soak.world import SERVICE, World

# How the names of replicas begin that are there only for a while, or at the end.
_OTHERS = ("late-", "passing-")
# What should not be, in words.
_FINDINGS = ("mixed_versions", "steps_back", "not_recovered", "problems", "leftovers", "tracebacks", "troubles")


def build_report(
    world: World,
    player: Player,
    *,
    kinds: Sequence[str],
    differing: Mapping[str, Mapping[str, int]],
    problems: Sequence[str],
    versions: int,
    late: Sequence[str],
    leftovers: Sequence[str],
    directory: tuple[int, int],
    options: SoakOptions,
) -> dict[str, Any]:
    """What was found."""
    put_back = world.put_back_unix_ns
    receipts = {
        each.name: of_pasts(read_journal(replica_journal(world.crew.folder, each.name)), put_back)
        for each in world.fleet.followers
    }
    recovered = _recovered(player, {name: Receipts.of_journal(lines) for name, lines in receipts.items()})
    counts = Counter(each.kind for each in player.happened)
    return {
        "seconds": options.seconds,
        "seed": options.seed,
        "faults": {kind: counts[kind] for kind in kinds},
        "missed": player.missed,
        "versions": versions,
        "versions_lost": sum(
            twice_acknowledged(world.crew.folder, name, model.runs, put_back)
            for name, model in world.plain.items()
        ),
        "rows_lost": sum(sum(differing[name].values()) for name in late),
        "replicas_equal": not any(differing.values()),
        "differing": {name: dict(tables) for name, tables in differing.items() if tables},
        "mixed_versions": [line["mixed"] for lines in receipts.values() for line in lines if line["mixed"]],
        "steps_back": [f"{name}: {each}" for name, lines in receipts.items() for each in steps_back(lines)],
        "recover_seconds": _spread(
            # Nobody had to recover from some, say from a backup that is damaged.
            [each.seconds for fault, each in recovered if fault.replicas and each.seconds is not None]
        ),
        "not_recovered": [f"{fault.kind}: {each.last}" for fault, each in recovered if each.seconds is None],
        "recoveries": [_line(fault, each) for fault, each in recovered],
        "reconnects": _reconnects(world),
        "bytes_resent": _bytes_resent(world, receipts),
        "starts": dict(sorted(world.crew.starts.items())),
        "memory": _by_role(world.crew.memory, world.fleet),
        "directory_bytes": directory[0],
        "directory_bytes_most": max(directory),
        "problems": list(problems),
        "leftovers": list(leftovers),
        "tracebacks": tracebacks(world.crew.folder),
        "troubles": world.crew.troubles,
        "logs": str(world.crew.folder),
    }


def sound(report: Mapping[str, Any]) -> bool:
    """Whether nothing was lost, and nothing happened that should not have."""
    wrong = any(report[name] for name in ("versions_lost", "rows_lost", "differing", *_FINDINGS))
    return bool(report["replicas_equal"]) and not wrong


def _recovered(player: Player, receipts: Mapping[str, Receipts]) -> list[tuple[Happened, Recovery]]:
    return [(each, recovery(each, receipts)) for each in player.happened]


def _line(fault: Happened, found: Recovery) -> dict[str, Any]:
    lasted = (fault.ended_unix_ns - fault.begun_unix_ns) / 1e9
    return {"kind": fault.kind, "begun": fault.begun_unix_ns / 1e9, "lasted": lasted, **vars(found)}


def _reconnects(world: World) -> int:
    """Connections of trainers and replicas beyond the first of each process that was started."""
    connections = sum(link.connections for link in world.links.values())
    return max(0, connections - sum(starts for name, starts in world.crew.starts.items() if name != SERVICE))


def _bytes_resent(world: World, receipts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """Bytes of ids and values that were sent beside what a step or a release had changed: by trainers that began
    from a checkpoint, and to replicas that were sent everything after their first release.
    """
    replicas = sum(line["bytes"] for lines in receipts.values() for line in lines[1:] if line["resync"])
    parts = [
        line
        for name, model in world.plain.items()
        for run in model.runs
        for rank in range(run.ranks)
        for line in read_journal(journal_file(world.crew.folder, name, run.number, rank))
        if "version" in line
    ]
    return {"trainers": sum(line["again"] for line in parts), "replicas": replicas}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99 = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": p50, "p99": p99, "max": max(seconds)}


def _by_role(memory: Mapping[str, int], fleet: Fleet) -> dict[str, int]:
    """The most that a process of each role has held."""
    stores = {each.name: f"replica ({each.store})" for each in fleet.followers}
    found: dict[str, int] = {}
    for name, held in memory.items():
        role = _role(name, stores)
        found[role] = max(found.get(role, 0), held)
    return dict(sorted(found.items()))


def _role(name: str, stores: Mapping[str, str]) -> str:
    if name == SERVICE or name in stores:
        return stores.get(name, name)
    if name.startswith(_OTHERS):
        return "other replica"
    return f"{CLICKS} rank" if name.startswith(f"{CLICKS}-rank") else "plain rank"


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the report for a person."""
    table = Table(
        title=f"{sum(report['faults'].values())} faults in {report['seconds']:.0f} s, seed {report['seed']}"
    )
    table.add_column("fault")
    table.add_column("times", justify="right")
    for kind, count in report["faults"].items():
        table.add_row(kind, str(count))
    console.print(table)
    for name, text in _lines(report):
        console.print(f"{name:<16}{text}", highlight=False, soft_wrap=True)


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    recover, resent = report["recover_seconds"], report["bytes_resent"]
    memory = ", ".join(f"{role} {held / 1e6:.0f} MB" for role, held in report["memory"].items())
    found = [
        ("versions", f"{report['versions']:,}"),
        ("reconnects", f"{report['reconnects']:,}"),
        (
            "bytes resent",
            f"{resent['trainers'] / 1e6:.1f} MB by trainers, {resent['replicas'] / 1e6:.1f} MB to replicas",
        ),
        ("memory", f"at most: {memory}"),
        (
            "directory",
            f"{report['directory_bytes'] / 1e6:.1f} MB, at most {report['directory_bytes_most'] / 1e6:.1f} MB",
        ),
        ("recovered", f"p50 {recover['p50']:.1f} s   p99 {recover['p99']:.1f} s   max {recover['max']:.1f} s"),
        ("rows lost", f"{report['rows_lost']:,}"),
        ("versions lost", f"{report['versions_lost']:,}"),
        ("replicas equal", "yes" if report["replicas_equal"] else f"NO: {report['differing']}"),
    ]
    found += [(name, str(each)) for name in (*_FINDINGS, "missed") for each in report[name]]
    return [*found, ("sound", "yes" if sound(report) else f"NO: {report['logs']} has the logs and journals")]
