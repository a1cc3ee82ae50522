from pathlib import Path

import pytest

from deltasync.client import PublisherOptions, SubscriberOptions
from deltasync.log.log_store import LogOptions
from deltasync.service.options import ServiceOptions

PUBLISHER = {"service": "h:1", "model": "m", "run": "r", "run_started_unix_ns": 1}
SUBSCRIBER = {"service": "h:1", "consumer": "c"}
SHARED = {"log": ("nats://b",), "checkpoints": "c"}
LOG = {"directory": Path("x")}


@pytest.mark.parametrize(
    ("kind", "good", "field", "value", "said"),
    [
        (PublisherOptions, PUBLISHER, "service", "nowhere", "service 'nowhere': expected HOST:PORT"),
        (PublisherOptions, PUBLISHER, "service", "host:port", "expected HOST:PORT"),
        (PublisherOptions, PUBLISHER, "service", ":80", "expected HOST:PORT"),
        (PublisherOptions, PUBLISHER, "model", "a/b", "model name 'a/b'"),
        (PublisherOptions, PUBLISHER, "rank", 1, "rank 1: expected 0 to 0"),
        (PublisherOptions, PUBLISHER, "rank", -1, "rank -1"),
        (PublisherOptions, PUBLISHER, "world_size", 0, "world_size 0: expected 1 or more"),
        (SubscriberOptions, SUBSCRIBER, "service", "", "service ''"),
        (SubscriberOptions, SUBSCRIBER, "consumer", "", "consumer name ''"),
        (SubscriberOptions, SUBSCRIBER, "replica", "a b", "replica name 'a b'"),
        (SubscriberOptions, SUBSCRIBER, "max_outstanding_bytes", 0, "max_outstanding_bytes 0"),
        (ServiceOptions, {}, "checkpoint_bytes", 17 << 30, f"--checkpoint-bytes: {17 << 30}, expected at most"),
        (ServiceOptions, {}, "tls_cert", Path("c.pem"), "also give --tls-key"),
        (ServiceOptions, {}, "tls_client_ca", Path("ca.pem"), "also give --tls-cert and --tls-key"),
        (ServiceOptions, SHARED, "checkpoints", None, "--log: also give --checkpoints"),
        (ServiceOptions, SHARED, "process", "a b", "process name 'a b'"),
        (ServiceOptions, SHARED, "advertise_http", "b:80", "--advertise-http: 'b:80': expected a URL"),
        (ServiceOptions, SHARED, "log_replicas", 2, "--log-replicas: 2, expected 1, 3 or 5"),
        (LogOptions, LOG, "max_bytes", 1000, "max_bytes: 1000"),
    ],
)
def test_a_wrong_value_names_its_field(
    kind: type, good: dict[str, object], field: str, value: object, said: str
) -> None:
    kind(**good)
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        kind(**good | {field: value})
    assert said in str(refused.value)


def test_replicas_are_named_apart_by_default() -> None:
    first, second = (SubscriberOptions(service="h:1", consumer="c") for _ in range(2))
    assert first.replica != second.replica
