"""Channels, and how often to try again."""

import random
from collections.abc import Iterator

import grpc

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    # Inside the trusted network there is no proxy; one meant for the package index must not be asked.
    ("grpc.enable_http_proxy", 0),
    # A peer that hangs is found within 15 s; without the third one only after 65 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Retries are ours (see `backoff`); gRPC's own pause of up to two minutes would only add to them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

_FIRST_SECONDS, _LONGEST_SECONDS = 0.05, 5.0


def open_channel(service: str) -> grpc.Channel:
    """A channel to `service`, HOST:PORT."""
    return grpc.insecure_channel(service, _CHANNEL_OPTIONS)


def backoff() -> Iterator[float]:
    """Seconds to wait before each further try: doubling, with jitter so that a fleet does not return at once."""
    seconds = _FIRST_SECONDS
    while True:
        yield seconds * random.uniform(0.5, 1.0)  # noqa: S311  # not for secrets
        seconds = min(2 * seconds, _LONGEST_SECONDS)
