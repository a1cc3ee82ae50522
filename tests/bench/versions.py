"""What kept versions cost: the bytes of a rollback, and cuts while versions are kept.

rollback_ratio  Bytes of ids and values in the release with which a consumer goes back to a kept version, or its
                model is rolled back to it, over those of the replica's rows that the release changes. Since that
                version, some rows have changed several times, and others have got their old values back. One
                consumer is sent everything, and one the tenth that changed most, as int8. The figure is the
                largest.
cut_ratio       The median time from publish to applied of cuts that begin while a version is kept, over that of
                cuts in a turn without, of the same service. A turn is as long as the interval between kept
                versions, and a cut begins at a fixed interval after the one before, if that has ended.
mean_cut_ratio  The mean of all cuts of a turn in which a version is kept, over that of a turn without. The other
                work of the machine has more weight in it.
"""

import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.children import Children, publisher
from tests.bench.scale import SizedTable, uniform
from tests.bench.timing import spread_of

from deltasync.client import (
    Admin,
    Endpoint,
    NumpyTarget,
    Part,
    Policy,
    Publisher,
    Release,
    RowBatch,
    Subscriber,
    SubscriberOptions,
    TableSpec,
    ValueType,
    Written,
)
from deltasync.core.rows import Ids

_MODEL = "bench"
_POLICIES = {"everything": Policy(), "topk-int8": Policy(top_k=0.1, value_type=ValueType.INT8)}
# Only those that are asked for are written.
_NONE_BY_ITSELF = ("--checkpoint-bytes", str(16 << 30), "--checkpoint-seconds", "86400")
_PATIENCE_SECONDS = 600.0
_CUTS, _OF_A_CUT = 10, 0.02
_AIM_ROLLBACK, _AIM_CUT = 1.1, 1.2


OPTIONS = (
    click.option("--rows", type=click.IntRange(100), default=1_000_000, help="Rows of the table."),
    click.option("--dim", type=click.IntRange(1), default=64, help="Values of a row."),
    click.option("--cut-rows", type=click.IntRange(1), default=10_000, help="Rows of a cut that is timed."),
    click.option(
        "--cut-seconds", type=click.FloatRange(0), default=0.05, help="Interval between cuts that are timed."
    ),
    click.option(
        "--every", type=click.FloatRange(0, min_open=True), default=10.0, help="Seconds between kept versions."
    ),
    click.option("--rounds", type=click.IntRange(1), default=5, help="Rollbacks, and turns of each service."),
)


def run(
    console: Console, rows: int, dim: int, cut_rows: int, cut_seconds: float, every: float, rounds: int
) -> dict[str, Any]:
    spec = TableSpec("bench", rows, dim)
    figures = _rolled_back(spec, rounds)
    figures |= _cuts(spec, min(cut_rows, rows), cut_seconds, every, rounds)
    figures |= {"rows": rows, "dim": dim, "cut_rows": min(cut_rows, rows), "every": every, "rounds": rounds}
    _print(console, figures)
    return figures


class MeasuredTarget(NumpyTarget):
    """A replica that compares the bytes of a release with those of the rows that it changes.

    Attributes:
        ratio: the first over the second, of the last release.
    """

    def __init__(self, row_bytes: int) -> None:
        super().__init__()
        self.ratio = 0.0
        self._row_bytes, self._version = row_bytes, 0
        self._before: dict[str, NDArray[Any]] | None = None  # Until a release is complete.
        self._applied = threading.Condition()

    def apply(self, release: Release) -> Written | None:
        if self._before is None:
            self._before = {name: rows.copy() for name, rows in self.tables.items()}
        written = super().apply(release)
        if release.more:
            return written
        changed = sum(int((self.tables[name] != rows).any(axis=1).sum()) for name, rows in self._before.items())
        with self._applied:
            self.ratio = release.bytes / max(1, changed * self._row_bytes)
            self._version, self._before = release.version, None
            self._applied.notify_all()
        return written

    def await_version(self, version: int) -> None:
        with self._applied:
            if not self._applied.wait_for(lambda: self._version == version, _PATIENCE_SECONDS):
                raise RuntimeError(f"a replica of the benchmark stays at version {self._version}, not {version}")


class _Fleets:
    """A service with a replica of each consumer in this process, and a publisher."""

    def __init__(self, spec: TableSpec, grpc: str, admin: Admin, source: Publisher, stack: ExitStack) -> None:
        self._spec, self.admin, self._source = spec, admin, source
        self.targets = {name: MeasuredTarget(policy.row_bytes(spec)) for name, policy in _POLICIES.items()}
        for name, target in self.targets.items():
            admin.create_consumer(name, _MODEL, _POLICIES[name])
            options = SubscriberOptions(service=grpc, consumer=name, replica=name)
            stack.enter_context(Subscriber(options, target))
        self._generator = np.random.default_rng(0)
        self._step = 0
        self.values = np.zeros((spec.rows, spec.dim), np.float32)

    def change(self, ids: Ids) -> int:
        """Give some rows other values; returns the version."""
        self.values[ids] = self._generator.standard_normal((len(ids), self._spec.dim), np.float32)
        return self.publish(ids)

    def publish(self, ids: Ids) -> int:
        """Publish the values of some rows, and wait for all replicas; returns the version."""
        self._step += 1
        rows = [RowBatch.of_table(self._spec, ids, self.values[ids])]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=self._step == 1)
        version = self._source.publish(part).result().number
        self.ratios(version)
        return version

    def follow(self, version: str) -> None:
        """Let all consumers follow a version."""
        for name in self.targets:
            self.admin.follow_version(name, version)

    def draw(self) -> Ids:
        return uniform(self._generator, self._spec.rows, max(1, int(_OF_A_CUT * self._spec.rows)))

    def ratios(self, version: int) -> dict[str, float]:
        """Wait until the replicas have a version; returns the ratio of each at that release."""
        for target in self.targets.values():
            target.await_version(version)
        return {name: target.ratio for name, target in self.targets.items()}


def _rolled_back(spec: TableSpec, rounds: int) -> dict[str, Any]:
    follow, model = list[dict[str, float]](), list[dict[str, float]]()
    for _ in range(rounds):
        with ExitStack() as stack:
            token = secrets.token_hex()
            children = stack.enter_context(Children())
            service = children.service(*_NONE_BY_ITSELF, admin_token=token)
            source = stack.enter_context(publisher(service.grpc, [spec]))
            fleets = _Fleets(spec, service.grpc, Admin(Endpoint(service.http, token)), source, stack)
            fleets.change(np.arange(spec.rows))
            kept = fleets.admin.keep_version(_MODEL, "good")["version"]
            for _ in range(_CUTS):
                fleets.change(fleets.draw())
            back = fleets.draw()
            old = fleets.values[back].copy()
            fleets.change(back)
            fleets.values[back] = old
            newest = fleets.publish(back)

            fleets.follow("good")
            follow.append(fleets.ratios(kept))
            fleets.follow("live")
            fleets.ratios(newest)
            model.append(fleets.ratios(fleets.admin.roll_back(_MODEL, "good")))
    return {
        "rollback_ratio": max(max(each.values()) for each in (*follow, *model)),
        "follow_ratios": {name: statistics.median(each[name] for each in follow) for name in _POLICIES},
        "model_ratios": {name: statistics.median(each[name] for each in model) for name in _POLICIES},
    }


def _cuts(spec: TableSpec, cut_rows: int, cut_seconds: float, every: float, rounds: int) -> dict[str, Any]:
    token, generator = secrets.token_hex(), np.random.default_rng(1)
    without, whole, meanwhile, taken = list[list[float]](), list[list[float]](), list[list[float]](), list[float]()
    with ExitStack() as stack:
        children = stack.enter_context(Children())
        service = children.service("--consumer", f"{_MODEL}={_MODEL}", *_NONE_BY_ITSELF, admin_token=token)
        replica = children.peer("fleet", service.grpc, _MODEL)
        replica.read()
        source = stack.enter_context(publisher(service.grpc, [spec]))
        table = SizedTable(spec, service.pid, service.http, source, replica)
        admin, thread = Admin(Endpoint(service.http, token)), stack.enter_context(ThreadPoolExecutor(1))

        def keep() -> float:
            """Keep a version; returns when it was kept."""
            admin.keep_version(_MODEL)
            return time.monotonic()

        def turn() -> dict[float, float]:
            """Seconds of each cut, by its beginning."""
            found, end = dict[float, float](), time.monotonic() + every
            while (begun := time.monotonic()) < end:
                found[begun] = table.cut(uniform(generator, spec.rows, cut_rows))
                time.sleep(max(0.0, begun + cut_seconds - time.monotonic()))
            return found

        for number in range(1 + rounds):
            keep()
            before = turn()
            begun, keeping = time.monotonic(), thread.submit(keep)  # It has the rows of one turn to write.
            during, kept = turn(), keeping.result()
            if number:  # The first round touches memory and disk for the first time.
                without.append(list(before.values()))
                whole.append(list(during.values()))
                meanwhile.append([seconds for at, seconds in during.items() if at < kept])
                taken.append(kept - begun)
    pairs = list(zip(without, whole, meanwhile, strict=True))
    cuts = {"": without, "kept_": meanwhile}
    every_cut = {name: sorted(each for turn in turns for each in turn) for name, turns in cuts.items()}
    return {
        **spread_of("cut_ratio", [statistics.median(kept) / statistics.median(other) for other, _, kept in pairs]),
        **spread_of(
            "mean_cut_ratio", [statistics.fmean(kept) / statistics.fmean(other) for other, kept, _ in pairs]
        ),
        **{f"{name}cut_seconds": statistics.median(each) for name, each in every_cut.items()},
        **{f"{name}cut_p99_seconds": each[int(0.99 * len(each))] for name, each in every_cut.items()},
        "keep_seconds": statistics.median(taken),
        "cuts_meanwhile": len(every_cut["kept_"]),
    }


def _print(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"versions: a table of {figures['rows']:,} rows x {figures['dim']} fp32, {figures['rounds']} rounds"
    )
    for key, says in (("follow_ratios", "a consumer follows a kept version"), ("model_ratios", "models rollback")):
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in figures[key].items())
        console.print(f"  {says}: bytes sent over bytes that differ: {ratios}")
    console.print(f"  rollback_ratio {figures['rollback_ratio']:.3f}  (aim {_AIM_ROLLBACK})")
    for name, says in (("", "no version is kept"), ("kept_", "while one is kept")):
        median, p99 = (1e3 * figures[f"{name}cut_{key}seconds"] for key in ("", "p99_"))
        console.print(f"  cuts of {figures['cut_rows']:,} rows, {says}: p50 {median:.1f} ms, p99 {p99:.1f} ms")
    console.print(
        f"  one is kept every {figures['every']:g} s, which takes {figures['keep_seconds']:.2f} s; "
        f"{figures['cuts_meanwhile']:,} cuts meanwhile"
    )
    for name, aim in (("cut_ratio", f"  (aim {_AIM_CUT})"), ("mean_cut_ratio", "")):
        low, high = figures[f"{name}_low"], figures[f"{name}_high"]
        console.print(f"  {name} {figures[name]:.2f} ({low:.2f} to {high:.2f}){aim}")
