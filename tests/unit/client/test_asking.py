"""Asking which rows a service wants, of a channel that is closed by another thread just then."""

from deltasync.client import Endpoint
from deltasync.client.wanted_rows import ask_wanted
from deltasync.v1 import publish_pb2


def test_nobody_answers_on_a_closed_channel() -> None:
    channel = Endpoint("localhost:1").channel()
    channel.close()
    assert ask_wanted(channel, publish_pb2.PublishOpen(model="clicks")) is None
