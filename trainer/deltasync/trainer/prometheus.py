"""Prometheus metrics of a trainer's rank."""

import weakref
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltasync.base.addresses import host_and_port, with_port
from deltasync.base.errors import InvalidInput
from deltasync.base.process import built_version
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.sync_options import COUNTERS, GAUGES

_LABELS = ("model", "rank")


class TrainerCollector(Collector):
    """Reads the metrics of a `DeltaSync` at each scrape, without keeping it or its model alive."""

    def __init__(self, sync: DeltaSync, model: str, rank: int) -> None:
        self._sync, self._of = weakref.ref(sync), (model, str(rank))

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics, without those of a `DeltaSync` that no longer exists."""
        known = sync.metrics() if (sync := self._sync()) else {}
        for kind, texts in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text in texts.items() if known else ():
                metric = kind(f"deltasync_trainer_{name}", text, labels=_LABELS)
                metric.add_metric(self._of, known[name])
                yield metric
        build = GaugeMetricFamily("deltasync_trainer_build_info", "Always 1.", labels=("version",))
        build.add_metric((built_version(),), 1)
        yield build


def serve_metrics(sync: DeltaSync, model: str, rank: int, address: str, offset: int = 0) -> None:
    """Serve `/metrics` from a thread until the process ends.

    Args:
        sync: the source of the metrics.
        model: name of the model, for the label `model`.
        rank: rank of this process, for the label `rank`.
        address: HOST:PORT of the first rank on a machine or in a pod.
        offset: number to add to the port: the local rank on the machine or in the pod.

    Raises:
        InvalidInput: `address` is not HOST:PORT, or this process cannot listen on the port.
    """
    try:
        host, port = host_and_port(address)
        host_and_port(with_port(host, port + offset))
    except InvalidInput as error:
        raise InvalidInput(f"metrics at {error}") from error
    registry = CollectorRegistry()
    registry.register(TrainerCollector(sync, model, rank))
    ProcessCollector(registry=registry)
    try:
        start_http_server(port + offset, host, registry=registry)
    except OSError as error:
        raise InvalidInput(f"metrics at {address!r}, of rank {rank}: {error}") from error
