"""Calls that are cheap to make, as many as go through."""

import threading
from collections.abc import Callable
from typing import Any

import grpc
from tests.attacks.attack import Answers, Family, Outcome, until
from tests.attacks.messages import PUBLISH, SUBSCRIBE, Stream, ask, opening, subscription
from tests.attacks.target import Target

from deltasync.v1 import subscribe_pb2

FAMILY = Family()


def _together(send: Callable[[int], None], senders: int = 4) -> None:
    threads = [threading.Thread(target=send, args=(n,)) for n in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _flood(target: Target, call: Callable[[grpc.Channel, int], None], senders: int = 4) -> None:
    """Make calls, one after the other, on so many connections."""
    with target.channels(senders) as channels:

        def send(sender: int) -> None:
            for number in until(target.seconds):
                call(channels[sender], number * senders + sender)

        _together(send, senders)


def _flood_of_streams(target: Target, method: str, message_of: Callable[[int], Any]) -> Outcome:
    answers = Answers()
    _flood(target, lambda channel, number: ask(target, channel, answers, method, message_of(number)))
    return answers.outcome


@FAMILY.attack("a flood of new models")
def opens_of_models(target: Target) -> Outcome:
    return _flood_of_streams(target, PUBLISH, lambda number: opening(f"strange-{number}"))


@FAMILY.attack("a flood of subscriptions to unknown consumers")
def opens_of_no_consumer(target: Target) -> Outcome:
    return _flood_of_streams(target, SUBSCRIBE, lambda number: subscription("stranger", f"consumer-{number}"))


@FAMILY.attack("a flood of changes without a token")
def calls(target: Target) -> Outcome:
    answers = Answers()
    method = "SubscribeService/Leave"
    request = subscribe_pb2.LeaveRequest(consumer="predictors", replica="strange")

    def call(channel: grpc.Channel, _number: int) -> None:
        try:
            target.unary(channel, method)(request, metadata=target.metadata, timeout=10)
            answers.add(f"{method} answers")
        except grpc.RpcError as error:
            answers.refused(error)

    _flood(target, call)
    return answers.outcome


@FAMILY.attack("a flood of cancelled streams")
def cancelled_streams(target: Target) -> Outcome:
    count = 0

    def call(channel: grpc.Channel, number: int) -> None:
        nonlocal count
        stream = Stream(target, channel, SUBSCRIBE if number % 2 else PUBLISH)
        stream.send(subscription(f"stranger-{number % 50}") if number % 2 else opening("strange"))
        stream.answers.cancel()
        stream.end()
        count += 1

    _flood(target, call)
    return Outcome(f"{count} streams")


@FAMILY.attack("a flood of HTTP reads")
def http_requests(target: Target) -> Outcome:
    answers = Answers()
    paths = (
        "/metrics",
        "/consumers",
        "/consumers/predictors",
        "/tables",
        "/models",
        "/nowhere",
        "/openapi.json",
    )

    def send(sender: int) -> None:
        for number in until(target.seconds):
            path = paths[(number + sender) % len(paths)]
            try:
                with target.connect("http") as connection:
                    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
                    answers.add(f"HTTP {connection.recv(64).split(b' ')[1].decode()}")
                    while connection.recv(1 << 16):
                        pass
            except (OSError, IndexError):
                answers.add("no answer")

    _together(send)
    return answers.outcome
