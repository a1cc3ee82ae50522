"""Which role every gRPC call and every HTTP route needs. What is not in the table needs `admin`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltasync.core.access import Role


@dataclass(frozen=True)
class Need:
    """What a call or a route needs.

    Attributes:
        role: None = nothing: anyone may make it.
        of: what in its first message names the model or the consumer that the role is needed for, or else what it
            is about; empty if there is no such thing.
    """

    role: Role | None
    of: str = ""

    def name(self, message: Any) -> str | None:
        """The name in a first message; None if it has none to have a role for."""
        *outer, last = self.of.split(".")
        for each in outer:
            if not message.HasField(each):
                return None
            message = getattr(message, each)
        return str(getattr(message, last)) if last else None


_ANYONE, _READ, _ADMIN = Need(None), Need(Role.READ), Need(Role.ADMIN)

CALLS: Mapping[str, Need] = {
    "/deltasync.v1.PublishService/Publish": Need(Role.PUBLISH, "open.model"),
    "/deltasync.v1.SubscribeService/Subscribe": Need(Role.SUBSCRIBE, "open.consumer"),
    "/deltasync.v1.SubscribeService/Leave": Need(Role.SUBSCRIBE, "consumer"),
    "/grpc.health.v1.Health/Check": Need(None, "service"),
    "/grpc.health.v1.Health/Watch": Need(None, "service"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _READ,
}

ROUTES: Mapping[tuple[str, str], Need] = {
    ("GET", "/livez"): _ANYONE,
    ("GET", "/readyz"): _ANYONE,
    ("GET", "/"): _ANYONE,
    ("GET", "/page/{name}"): _ANYONE,
    ("GET", "/docs"): _ANYONE,
    ("GET", "/openapi.json"): _ANYONE,
    ("GET", "/consumers"): _READ,
    ("GET", "/consumers/{name}"): _READ,
    ("GET", "/consumers/{name}/lag"): _READ,
    ("GET", "/consumers/{name}/history"): _READ,
    ("GET", "/lag"): _READ,
    ("GET", "/status"): _READ,
    ("GET", "/version"): _READ,
    ("GET", "/versions"): _READ,
    ("GET", "/trainers"): _READ,
    ("GET", "/events"): _READ,
    ("GET", "/log-levels"): _READ,
    ("GET", "/models"): _READ,
    ("GET", "/processes"): _READ,
    ("GET", "/checkpoints"): _READ,
    ("GET", "/tables"): _READ,
    ("GET", "/tables/{name:path}"): _READ,
    ("GET", "/deletes"): _READ,
    ("GET", "/metrics"): _READ,
    ("POST", "/consumers"): _ADMIN,
    ("PUT", "/consumers/{name}"): _ADMIN,
    ("PUT", "/consumers/{name}/policy"): _ADMIN,
    ("DELETE", "/consumers/{name}"): _ADMIN,
    ("PUT", "/consumers/{name}/pause"): _ADMIN,
    ("DELETE", "/consumers/{name}/pause"): _ADMIN,
    ("DELETE", "/consumers/{name}/replicas/{replica}"): _ADMIN,
    ("POST", "/consumers/{name}/replicas/{replica}/verify"): _ADMIN,
    ("POST", "/models/{name}/checkpoint"): _ADMIN,
    ("POST", "/models/{name}/move"): _ADMIN,
    ("DELETE", "/models/{name}"): _ADMIN,
    ("DELETE", "/models/{name}/tables/{table:path}"): _ADMIN,
    ("POST", "/deletes"): _ADMIN,
    ("PUT", "/log-levels"): _ADMIN,
    ("POST", "/fsck"): _ADMIN,
    ("POST", "/backup"): _ADMIN,
    ("POST", "/drain"): _ADMIN,
}


def need_of_call(method: str) -> Need:
    """What a gRPC call needs, by its full name: `/deltasync.v1.PublishService/Publish`."""
    return CALLS.get(method, _ADMIN)


def need_of_request(method: str, path: str) -> Need:
    """What an HTTP request needs, by the path that it asks for, encoded."""
    # Kinds of requests that browsers and probes make of what there is to GET.
    method = "GET" if method in ("HEAD", "OPTIONS") else method
    parts = path.split("/")
    return next((need for (kind, route), need in ROUTES.items() if kind == method and _fits(parts, route)), _ADMIN)


def _fits(parts: list[str], route: str) -> bool:
    """Whether a path's parts are those of a route, whose names may be anything but nothing; the last one may be of
    several parts, where the route says so.
    """
    wanted = route.split("/")
    if wanted[-1].endswith(":path}") and len(parts) > len(wanted):
        parts = [*parts[: len(wanted) - 1], "/".join(parts[len(wanted) - 1 :])]
    return len(parts) == len(wanted) and all(map(_fits_part, parts, wanted))


def _fits_part(part: str, wanted: str) -> bool:
    return bool(part) if wanted.startswith("{") else part == wanted
