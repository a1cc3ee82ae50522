"""Prometheus metrics, computed when they are asked for."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sync_service.consumers.lag import ConsumerLag
from sync_service.service import Service


async def exposition(service: Service) -> bytes:
    """The metrics in Prometheus' text format."""
    lags = [await service.lag(consumer) for consumer in list(service.registry.consumers.values())]
    registry = CollectorRegistry()
    registry.register(_Snapshot([*_consumer_metrics(service, lags), *_model_metrics(service)]))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Metrics that were measured before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _counter(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _consumer_metrics(service: Service, lags: list[ConsumerLag]) -> list[Metric]:
    consumers = service.registry.consumers.values()
    lag = [
        _gauge(f"consumer_lag_{unit}", text, ["consumer"], [([c.consumer], getattr(c.lag, unit)) for c in lags])
        for unit, text in {
            "versions": "Sealed versions the consumer's last replica has not applied.",
            "rows": "Rows the consumer's last replica has not applied.",
            "bytes": "Bytes of ids and values the consumer's last replica has not applied.",
            "seconds": "Age of the oldest version the consumer's last replica has not applied.",
        }.items()
    ]
    replicas = [
        ([c.consumer, state], float(sum(r.connected == (state == "connected") for r in c.replicas)))
        for c in lags
        for state in ("connected", "away")
    ]
    rows = [([c.name], float(c.released_rows)) for c in consumers]
    size = [([c.name], float(c.released_bytes)) for c in consumers]
    return [
        *lag,
        _gauge("consumer_replicas", "Replicas of the consumer.", ["consumer", "state"], replicas),
        _counter("released_rows", "Rows sent to replicas since the service started.", ["consumer"], rows),
        _counter("released_bytes", "Bytes of ids and values sent to replicas.", ["consumer"], size),
    ]


def _model_metrics(service: Service) -> list[Metric]:
    models = {name: publishing.model for name, publishing in service.publishing.items()}
    tables = [(name, mapped.table) for name, model in models.items() for mapped in model.tables]
    published = service.publishing.items()
    return [
        _gauge(
            "head_version",
            "Newest sealed version.",
            ["model"],
            [([name], float(model.sealed_version)) for name, model in models.items()],
        ),
        _counter(
            "published_rows",
            "Rows of sealed cuts since the service started.",
            ["model"],
            [([name], float(p.rows)) for name, p in published],
        ),
        _counter(
            "published_bytes",
            "Bytes of ids and values of sealed cuts.",
            ["model"],
            [([name], float(p.bytes)) for name, p in published],
        ),
        _gauge(
            "table_rows",
            "Rows of the table.",
            ["model", "table"],
            [([name, table.name], float(table.rows)) for name, table in tables],
        ),
        _gauge(
            "table_bytes",
            "Bytes of the table's values.",
            ["model", "table"],
            [([name, table.name], float(table.nbytes)) for name, table in tables],
        ),
        _gauge("log_bytes", "Bytes the log holds.", [], [([], float(service.log.used_bytes()))]),
    ]
