"""Metrics of what peers may take of the service."""

from prometheus_client.core import Metric

from deltasync.core.limits import Limits
from deltasync.status.metric_families import counter, gauge


def limit_metrics(limits: Limits) -> list[Metric]:
    """Each limit; of those of what there is in all, how much is taken; and how often one was reached."""
    return [
        gauge(
            "limit",
            "The most that peers may take.",
            ["limit"],
            [([name], most) for name, most in limits.options.by_name.items()],
        ),
        gauge(
            "limit_taken",
            "How much of it is taken, where that is one number.",
            ["limit"],
            [([name], number) for name, number in sorted(limits.taken.items())],
        ),
        counter(
            "limit_refused",
            "How often it was reached since the service started.",
            ["limit"],
            [([name], limits.refused[name]) for name in limits.options.by_name],
        ),
    ]
