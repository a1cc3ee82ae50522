"""Short ways to make a Prometheus metric with all of its samples."""

from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from deltasync.storage.durations import BOUNDS, Durations

# Values of the labels, and the number.
Sample = tuple[list[str], float]


def gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that goes up and down."""
    return _filled(GaugeMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that only grows until the service starts anew; `_total` is added to its name."""
    return _filled(CounterMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def histogram(name: str, text: str, durations: Durations) -> Metric:
    """How often something took how long since the service started."""
    counts, seconds = durations.read()
    ends = [*map(str, BOUNDS), "+Inf"]
    buckets = list(zip(ends, accumulate(counts), strict=True))
    return HistogramMetricFamily(f"deltasync_{name}", text, buckets=buckets, sum_value=seconds)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, number in samples:
        family.add_metric(values, float(number))
    return family
