"""`deltasync consumers`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
import grpc
from deltasync.v1 import admin_pb2, admin_pb2_grpc

from sync_service.cli.config import CONTEXT
from sync_service.client.connection import open_channel
from sync_service.error_codes import from_rpc_error

T = TypeVar("T")


@click.group()
def consumers() -> None:
    """List, create and delete consumers."""


def _service_option(function: Callable[..., None]) -> Any:
    return click.option(
        "--service", default="127.0.0.1:50051", help="Where the service answers gRPC, as HOST:PORT."
    )(function)


def _token_option(function: Callable[..., None]) -> Any:
    return click.option(
        "--admin-token",
        default="",
        show_default=False,
        help="The service's admin token; also DELTASYNC_ADMIN_TOKEN.",
    )(function)


@consumers.command("list", context_settings=CONTEXT)
@_service_option
def list_consumers(service: str) -> None:
    """List all consumers."""
    answer = _call(service, lambda stub: stub.ListConsumers(admin_pb2.ListConsumersRequest(), timeout=10))
    for consumer in answer.consumers:
        click.echo(f"{consumer.name}\t{consumer.model}")


@consumers.command("create", context_settings=CONTEXT)
@click.argument("name")
@click.option("--model", required=True, help="The model it subscribes to.")
@_service_option
@_token_option
def create_consumer(name: str, model: str, service: str, admin_token: str) -> None:
    """Make consumer NAME; making an equal one again changes nothing."""
    request = admin_pb2.CreateConsumerRequest(consumer=admin_pb2.Consumer(name=name, model=model))
    _call(service, lambda stub: stub.CreateConsumer(request, timeout=10, metadata=_metadata(admin_token)))
    click.echo(f"consumer {name} follows model {model}")


@consumers.command("delete", context_settings=CONTEXT)
@click.argument("name")
@_service_option
@_token_option
def delete_consumer(name: str, service: str, admin_token: str) -> None:
    """Forget consumer NAME and its offsets."""
    request = admin_pb2.DeleteConsumerRequest(name=name)
    _call(service, lambda stub: stub.DeleteConsumer(request, timeout=10, metadata=_metadata(admin_token)))
    click.echo(f"consumer {name} deleted")


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def _call(service: str, call: Callable[[admin_pb2_grpc.AdminServiceStub], T]) -> T:
    with open_channel(service) as channel:
        try:
            return call(admin_pb2_grpc.AdminServiceStub(channel))
        except grpc.RpcError as error:
            raise from_rpc_error(error, service) from error
