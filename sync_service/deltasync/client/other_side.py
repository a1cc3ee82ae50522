"""The other side of a service: where it answers HTTP, by where it answers gRPC, and the other way round.

Of several processes each is asked by itself, all at once: it says its own port, and one that is gone says nothing,
which keeps nobody waiting.
"""

import contextlib
import queue
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint, is_url
from deltasync.core.errors import ServiceUnavailable

# Which of the processes has said what.
_Said: TypeAlias = queue.SimpleQueue[tuple[int, str | Exception]]

# Once one has answered, so long others are waited for.
_GRACE_SECONDS = 0.5


def http_of(service: Endpoint) -> Endpoint:
    """Where the service of an endpoint answers HTTP: each process that answers, at the port that it says, of the
    same host.

    Raises:
        InvalidInput: the address is neither HOST:PORT nor http://HOST:PORT.
        ServiceUnavailable: no process can be reached, or none says it.
    """
    if "://" in service.address or service.http:
        return Endpoint.of_http(service)
    found = _other_sides(Endpoint.of_grpc(service), _http_address)
    ca = service.ca if found.startswith("https://") else None
    return Endpoint.of_http(replace(service, address=found, ca=ca))


def grpc_of(service: Endpoint) -> Endpoint:
    """Where the service of an endpoint answers gRPC, likewise.

    Raises:
        InvalidInput: the address is neither HOST:PORT nor http://HOST:PORT.
        ServiceUnavailable: no process can be reached, or none says it.
    """
    if not any(is_url(each.address) for each in service.alone()):
        return Endpoint.of_grpc(service)
    found = _other_sides(Endpoint.of_http(replace(service, http="")), _grpc_address)
    return Endpoint.of_grpc(replace(service, address=found, http=""))


def _http_address(process: Endpoint) -> str:
    told = urllib.parse.urlsplit(Admin(process).describe().http)
    host = process.address.rpartition(":")[0]
    return f"{told.scheme}://{host}:{_port(told.port, process)}"


def _grpc_address(process: Endpoint) -> str:
    port = str(process.get_json("/version").get("grpc", "")).rpartition(":")[2]
    host = urllib.parse.urlsplit(process.address).hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{_port(int(port) if port else None, process)}"


def _port(port: int | None, process: Endpoint) -> int:
    if port is None:
        raise ServiceUnavailable(f"{process} does not say where its other side is: give the address of that one")
    return port


def _other_sides(service: Endpoint, ask: Callable[[Endpoint], str]) -> str:
    """The addresses of those processes that answer in time, with commas, in the order in which they are named.

    Raises:
        DeltasyncError: none does; what one has refused says more than that others are gone.
    """
    processes, said = service.alone(), _Said()
    if len(processes) == 1:
        return ask(processes[0])
    for at, process in enumerate(processes):
        threading.Thread(target=_say, args=(said, at, ask, process), name="other-side", daemon=True).start()
    found, errors = dict[int, str](), list[Exception]()
    with contextlib.suppress(queue.Empty):
        while len(found) + len(errors) < len(processes):
            at, answer = said.get(timeout=_GRACE_SECONDS if found else None)
            if isinstance(answer, str):
                found[at] = answer
            else:
                errors.append(answer)
    if not found:
        raise min(errors, key=lambda error: isinstance(error, ServiceUnavailable))
    return ",".join(found[at] for at in sorted(found))


def _say(said: _Said, at: int, ask: Callable[[Endpoint], str], process: Endpoint) -> None:
    try:
        said.put((at, ask(process)))
    except Exception as error:  # noqa: BLE001  # raised where it is waited for
        said.put((at, error))
