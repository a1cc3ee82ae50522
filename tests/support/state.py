"""The state of a service, seen from outside."""

from typing import Any, Protocol

import numpy as np

from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions


class Reachable(Protocol):
    """A service, in this process or another."""

    grpc: str
    http: str

    def get_json(self, path: str) -> Any: ...


def lag_of(service: Reachable, consumer: str = "predictors") -> dict[str, Any]:
    """A consumer's lag without the values that grow with time."""
    lag: dict[str, Any] = service.get_json(f"/consumers/{consumer}")
    for each in (lag, *lag["replicas"]):
        each["lag"] = {name: value for name, value in each["lag"].items() if "seconds" not in name}
    grows = ("seconds_since_ack", "connected", "since_seconds", "reason", "left")
    lag["replicas"] = [
        {name: value for name, value in each.items() if name not in grows} for each in lag["replicas"]
    ]
    return {name: lag[name] for name in lag.keys() - {"state", "reason", "head_seconds_behind_events"}}


def rows_of(service: Reachable) -> dict[str, np.ndarray]:
    """All rows that the service sends to a new replica of consumer "probes"."""
    head = service.get_json("/consumers/probes")["head"]
    target = NumpyTarget()
    with Subscriber(SubscriberOptions(service=service.grpc, consumer="probes", replica="probe"), target) as probe:
        probe.wait_for(head, 20)
    return target.tables


def state_of(service: Reachable) -> tuple[Any, Any, Any]:
    """Tables with their heads, the offsets and lag of "predictors", and every row."""
    rows = {name: table.tobytes() for name, table in rows_of(service).items()}
    tables = service.get_json("/tables")
    for each in tables:
        each.pop("refused", None)  # What was refused since.
    return tables, lag_of(service), rows
