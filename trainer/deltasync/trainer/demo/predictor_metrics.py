"""What a predictor tells Prometheus of itself."""

import math
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import nn

from deltasync.client import Release, Subscriber
from deltasync.client.torch_target import TorchTarget
from deltasync.core.event_time import seconds_behind


class PredictorMetrics:
    """Metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = its = CollectorRegistry()
        self.predict_seconds = Histogram(
            "predictor_predict_seconds", "How long a request took, waiting for a release included.", registry=its
        )
        self.rows = Counter("predictor_rows_applied", "Rows of releases, deletes included.", registry=its)
        self.apply_seconds = Histogram("predictor_apply_seconds", "How long a release took.", registry=its)

    def watch(self, subscriber: Subscriber) -> None:
        """Ask a subscriber at each scrape."""
        for name, text, value in (
            ("ready", "1 while /ready says so.", lambda: subscriber.ready),
            ("version", "The model's version that is served.", lambda: subscriber.version.number),
            (
                "event_age_seconds",
                "Since the newest event that this version was trained on; NaN where that is not known.",
                lambda: _age(subscriber.event_time_unix_ns),
            ),
        ):
            Gauge(f"predictor_{name}", text, registry=self.registry).set_function(value)


def _age(event_time_unix_ns: int | None) -> float:
    behind = seconds_behind(event_time_unix_ns, time.time_ns())
    return math.nan if behind is None else behind


class MeteredTarget(TorchTarget):
    """A target that counts what it applies."""

    def __init__(self, module: nn.Module, metrics: PredictorMetrics) -> None:
        super().__init__(module)
        self._metrics = metrics

    def apply(self, release: Release) -> None:
        """See `TorchTarget.apply`."""
        with self._metrics.apply_seconds.time():
            super().apply(release)
        self._metrics.rows.inc(sum(len(each.ids) for each in release.rows))
