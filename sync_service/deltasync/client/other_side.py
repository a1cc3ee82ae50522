"""The other side of a service: where it answers HTTP, by where it answers gRPC, and the other way round."""

import urllib.parse
from dataclasses import replace

from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint, is_url
from deltasync.client.route import Route
from deltasync.core.errors import ServiceUnavailable


def http_of(service: Endpoint) -> Endpoint:
    """Where the service of an endpoint answers HTTP: at the port that it says itself, of the same host.

    Raises:
        InvalidInput: the address is neither HOST:PORT nor http://HOST:PORT.
        ServiceUnavailable: it cannot be reached, or does not say it.
    """
    if "://" in service.address or service.http:
        return Endpoint.of_http(service)
    first = Endpoint.of_grpc(service).alone()[0]
    told = urllib.parse.urlsplit(Admin(service).describe().http)
    host = first.address.rpartition(":")[0]
    ca = first.ca if told.scheme == "https" else None
    return Endpoint.of_http(replace(first, address=f"{told.scheme}://{host}:{_port(told.port, service)}", ca=ca))


def grpc_of(service: Endpoint) -> Endpoint:
    """Where the service of an endpoint answers gRPC, likewise.

    Raises:
        InvalidInput: the address is neither HOST:PORT nor http://HOST:PORT.
        ServiceUnavailable: it cannot be reached, or does not say it.
    """
    if not is_url(service.address):
        return Endpoint.of_grpc(service)
    first = service.alone()[0]
    told = str(Route(Endpoint.of_http(service)).get_json("/version").get("grpc", ""))
    port = told.rpartition(":")[2]
    host = urllib.parse.urlsplit(first.address).hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return Endpoint.of_grpc(replace(first, address=f"{shown}:{_port(int(port) if port else None, service)}"))


def _port(port: int | None, service: Endpoint) -> int:
    if port is None:
        raise ServiceUnavailable(f"{service} does not say where its other side is: give the address of that one")
    return port
