"""Short ways to make a Prometheus metric with all of its samples."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from deltasync.core.durations import Durations

# Values of the labels, and the number.
Sample = tuple[list[str], float]


def gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that goes up and down."""
    return _filled(GaugeMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that only grows until the service starts anew; `_total` is added to its name."""
    return _filled(CounterMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def histogram(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], Durations]]) -> Metric:
    """How often something took how long since the service started."""
    family = HistogramMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, durations in samples:
        counts, seconds = durations.read()
        ends = [*map(str, durations.bounds), "+Inf"]
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), sum_value=seconds)
    return family


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, number in samples:
        family.add_metric(values, float(number))
    return family
