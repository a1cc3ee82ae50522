"""Metrics of a process among those that share a log, and of the checkpoints that it writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from deltasync.core.build import built_commit, built_version
from deltasync.core.probe_status import ProbeStatus
from deltasync.status.metric_families import counter, gauge


@dataclass(frozen=True, kw_only=True)
class ProcessFigures:
    """What this process is, taken at one moment.

    Attributes:
        confirmed: whether the others have heard of it within the lease; True where it is alone.
        alive: how many processes are, this one among them.
        unowned: how many models there are that no process owns.
        made_unix_ns: when the newest checkpoint of each model was complete, nanoseconds since 1970.
        unsaved_bytes: bytes that the log has of each model that its newest checkpoint does not have.
        failures: number of checkpoints that could not be written or copied.
        probe: what has become of rows that go all the way; None if none do.
        risks: how many ways there are, as far as is known, to lose what the log has acknowledged.
    """

    confirmed: bool = True
    alive: int = 1
    unowned: int = 0
    made_unix_ns: Mapping[str, int] = field(default_factory=dict)
    unsaved_bytes: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    risks: int = 0
    probe: ProbeStatus | None = None


def process_metrics(figures: ProcessFigures, now_unix_ns: int) -> list[Metric]:
    """What is known of it, at a time in nanoseconds since 1970."""
    probes = [figures.probe] if figures.probe else []
    ages = {model: max(0, now_unix_ns - made) / 1e9 for model, made in sorted(figures.made_unix_ns.items())}
    return [
        gauge(
            "build_info",
            "Which deltasync this is; always 1.",
            ["version", "commit"],
            [([built_version(), built_commit() or "unknown"], 1)],
        ),
        gauge(
            "lease_confirmed",
            "Whether the processes that share the log have heard of this one within the lease.",
            [],
            [([], figures.confirmed)],
        ),
        gauge("processes_alive", "Processes that share the log and are alive.", [], [([], figures.alive)]),
        gauge("models_without_owner", "Models that no process owns now.", [], [([], figures.unowned)]),
        gauge("log_risks", "Ways to lose what the log has acknowledged.", [], [([], figures.risks)]),
        gauge(
            "checkpoint_age_seconds",
            "How long ago the model's newest checkpoint was complete.",
            ["model"],
            [([model], age) for model, age in ages.items()],
        ),
        gauge(
            "log_bytes_since_checkpoint",
            "Bytes in the log that the model's newest checkpoint does not have.",
            ["model"],
            [([model], size) for model, size in sorted(figures.unsaved_bytes.items())],
        ),
        gauge(
            "probe_seconds",
            "How long the probe's last row took from being published to being held by a replica.",
            [],
            [([], probe.seconds) for probe in probes if probe.seconds is not None],
        ),
        gauge(
            "probe_age_seconds",
            "How long ago a row of the probe has come back, or for how long none has.",
            [],
            [([], probe.age_seconds) for probe in probes],
        ),
        counter(
            "probe_failures",
            "Rows of the probe that did not come back.",
            [],
            [([], probe.failures) for probe in probes],
        ),
        counter(
            "checkpoint_failures",
            "Checkpoints that could not be written or copied since the start.",
            [],
            [([], figures.failures)],
        ),
    ]
