"""Prometheus metrics, computed when they are asked for."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from deltasync.service.service import Service
from deltasync.status.consumer_metrics import consumer_metrics
from deltasync.status.metric_families import counter, gauge
from deltasync.status.report import lag_of


async def exposition(service: Service) -> bytes:
    """The metrics in Prometheus' text format."""
    consumers = list(service.registry.consumers.values())
    lags = [await lag_of(service, consumer) for consumer in consumers]
    registry = CollectorRegistry()
    registry.register(_Snapshot([*consumer_metrics(consumers, lags), *_model_metrics(service)]))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Metrics that were measured before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _model_metrics(service: Service) -> list[Metric]:
    models = service.models
    tables = [(name, mapped.spec) for name, model in models.items() for mapped in model.tables]
    published = service.coordinators.items()
    return [
        gauge(
            "head_version",
            "Newest sealed version.",
            ["model"],
            [([name], model.seals.newest_version) for name, model in models.items()],
        ),
        counter(
            "published_rows",
            "Rows of sealed cuts since the service started.",
            ["model"],
            [([name], p.rows) for name, p in published],
        ),
        counter(
            "published_bytes",
            "Bytes of ids and values of sealed cuts.",
            ["model"],
            [([name], p.bytes) for name, p in published],
        ),
        gauge(
            "table_rows",
            "Rows of the table.",
            ["model", "table"],
            [([name, table.name], table.rows) for name, table in tables],
        ),
        gauge(
            "table_bytes",
            "Bytes of the table's values.",
            ["model", "table"],
            [([name, table.name], table.nbytes) for name, table in tables],
        ),
        gauge("log_bytes", "Bytes the log holds.", [], [([], service.log.used_bytes())]),
    ]
