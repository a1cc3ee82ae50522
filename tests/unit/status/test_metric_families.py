"""Metrics are written as Prometheus' own client writes them."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from deltasync.status.metric_families import counter, gauge, text_of

WORDS = st.text(st.characters(codec="utf-8") | st.sampled_from('\\"\n{},'), max_size=8)
NUMBERS = st.one_of(st.floats(), st.integers(-(1 << 60), 1 << 60), st.booleans())


class Fixed(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


@given(st.data(), st.sampled_from([[], ["consumer"], ["consumer", "table"]]))
def test_the_text_is_that_of_the_client(data: st.DataObject, labels: list[str]) -> None:
    values = st.lists(WORDS, min_size=len(labels), max_size=len(labels))
    samples = data.draw(st.lists(st.tuples(values, NUMBERS), max_size=4))
    families = (
        GaugeMetricFamily("deltasync_lag", "Rows, at most.", labels=labels),
        CounterMetricFamily("deltasync_sent", "Rows sent.", labels=labels),
    )
    for family in families:
        for names, number in samples:
            family.add_metric(names, float(number))
    registry = CollectorRegistry()
    registry.register(Fixed(*families))
    cut = data.draw(st.integers(0, len(samples)))
    parts = [
        [gauge("lag", "Rows, at most.", labels, some), counter("sent", "Rows sent.", labels, some)]
        for some in (samples[:cut], samples[cut:])
    ]
    assert text_of(*parts).encode() == generate_latest(registry)
