"""One attack: what the service took before, at most and after, and how long honest cuts took meanwhile."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tests.attacks.attack import Attack, Outcome
from tests.attacks.service import Served, serving
from tests.attacks.target import Target, wait_until
from tests.attacks.watch import Watch

_WARM_SECONDS, _CALM_SECONDS, _LEAST_SECONDS, _REST_SECONDS = 1.0, 3.0, 3.0, 3.0
_DEADLINE_SECONDS = 45.0


def measured(attack: Attack, seconds: float, *, roles: bool, stranger: bool) -> dict[str, Any]:
    """Attack a service of its own for so long at most, where that could go on for ever."""
    with serving(attack, roles=roles or stranger) as served:
        token = served.stranger if stranger else ""
        target = Target(served.process.grpc, served.process.http, token, seconds=seconds)
        with (
            Watch(served.process.pid, served.process.data_dir, served.process.log) as watch,
            _honest(served) as honest,
        ):
            wait_until(time.monotonic() + _WARM_SECONDS)
            calm = time.monotonic()
            wait_until(calm + _CALM_SECONDS)
            before, begun = watch.anew(), time.monotonic()
            outcome = _attacked(attack, target)
            wait_until(begun + _LEAST_SECONDS)
            ended, most = time.monotonic(), watch.most
            wait_until(ended + _REST_SECONDS)
            told = _told(honest)
            alive = served.process.process is not None and served.process.process.poll() is None
            after = watch.look() if alive else most
    usage = {"before": before, "most": most, "after": after}
    return {
        "attack": attack.name,
        "says": attack.says,
        "went": outcome.said,
        "harm": outcome.harm,
        "alive": alive,
        "usage": {name: dataclasses.asdict(each) for name, each in usage.items()},
        "cuts": _cuts(told, calm, begun, ended),
        "failure": told["failure"] or told["replica"],
        "same_rows": told["same_rows"],
    }


@contextmanager
def _honest(served: Served) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.attacks.honest", served.process.grpc]
    environment = os.environ | {"ATTACKS_TOKEN": served.honest}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("the honest trainer and replica could not begin")
            yield process
        finally:
            process.kill()


def _told(honest: "subprocess.Popen[str]") -> dict[str, Any]:
    assert honest.stdin
    assert honest.stdout
    honest.stdin.write("\n")
    honest.stdin.flush()
    told: dict[str, Any] = json.loads(honest.stdout.readline())
    return told


def _attacked(attack: Attack, target: Target) -> Outcome:
    command = [sys.executable, "-m", "tests.attacks.attacker", attack.name]
    described = json.dumps(dataclasses.asdict(target))
    try:
        done = subprocess.run(
            command, input=described, capture_output=True, text=True, check=False, timeout=_DEADLINE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Outcome(f"went on for more than {_DEADLINE_SECONDS:.0f} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason"]
        return Outcome(f"ended with status {done.returncode}: {lines[-1]}")
    return Outcome(**json.loads(done.stdout))


def _cuts(told: dict[str, Any], calm: float, begun: float, ended: float) -> dict[str, float]:
    """Milliseconds that cuts took: 50 and 99 of 100, and the longest, without the attack and during it."""
    without = [took for at, took in told["cuts"] if at > calm and at + took < begun]
    during = [took for at, took in told["cuts"] if at + took >= begun and at <= ended]
    figures: dict[str, float] = {}
    for name, times in (("without", without), ("during", during or [_DEADLINE_SECONDS])):
        half, most = np.percentile(times, [50, 99]) * 1000
        figures |= {f"{name}_p50": half, f"{name}_p99": most, f"{name}_longest": max(times) * 1000}
    return {name: round(float(value), 2) for name, value in figures.items()}
