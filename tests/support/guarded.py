"""A service with access control, in a separate process, with a roles file and a log that a test reads."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from tests.support.process import ServiceProcess

from deltasync.access.roles import token_digest
from deltasync.v1 import publish_pb2, subscribe_pb2

# By the name of each token; the token itself is `token_of(name)`.
ROLES: Mapping[str, Sequence[str]] = {
    "trainer": ["publish:clicks*"],
    "other-trainer": ["publish:clicks*"],
    "predictor": ["subscribe:pred*"],
    "watcher": ["read"],
    "operator": ["admin"],
}


def token_of(name: str) -> str:
    return f"{name.replace(' ', '-')}-XYZZY-0123456789"


def roles_text(roles: Mapping[str, Sequence[str]] = ROLES) -> str:
    return "".join(
        f'[tokens.{name}]\nsha256 = "{token_digest(token_of(name)).hex()}"\nroles = {json.dumps(list(each))}\n'
        for name, each in roles.items()
    )


class GuardedService(ServiceProcess):
    """A service with a roles file, and with consumer "predictors" of model "clicks"."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.roles, log = folder / "roles.toml", folder / "service.log"
        self.write_roles()
        consumers = ("--consumer", "predictors=clicks", "--consumer", "others=clicks")
        super().__init__(folder / "data", "--roles", str(self.roles), *consumers, *arguments, log=log)
        self._environment["DELTASYNC_ADMIN_TOKEN"] = token_of("admin token")

    def write_roles(self, roles: Mapping[str, Sequence[str]] = ROLES) -> None:
        new = self.roles.with_suffix(".new")
        new.touch(0o600)
        new.write_text(roles_text(roles))
        new.replace(self.roles)

    def ask(self, method: str, path: str, name: str = "", body: bytes | None = None) -> tuple[int, str]:
        """Status and body of a request with the named token."""
        return self.request(method, path, token_of(name) if name else "", body)

    def call(self, method: str, name: str, request: Any = b"") -> tuple[grpc.StatusCode, str]:
        """Status code and details of a call with the named token; for a stream, after a message but `Alive`."""
        with grpc.insecure_channel(self.grpc) as channel:
            stream: Any = channel.stream_stream(method)
            message = request if isinstance(request, bytes) else request.SerializeToString()
            answers = stream(iter([message]), timeout=20, metadata=metadata_of(name))
            try:
                while _is_alive(method, next(answers)):
                    pass
            except grpc.RpcError as error:  # It is a call, too.
                return error.code(), error.details() or ""
            except StopIteration:
                pass
            answers.cancel()
            return grpc.StatusCode.OK, ""


def _is_alive(method: str, raw: bytes) -> bool:
    kinds: dict[str, Any] = {"Publish": publish_pb2.PublishResponse, "Subscribe": subscribe_pb2.SubscribeResponse}
    kind = kinds.get(method.rpartition("/")[2])
    return bool(kind and kind.FromString(raw).HasField("alive"))


def metadata_of(name: str) -> list[tuple[str, str]]:
    protocol = [("deltasync-protocol", "1")]
    return protocol + ([("authorization", f"Bearer {token_of(name)}")] if name else [])


def command_line_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def core_limits_of(pid: int) -> tuple[str, str]:
    """The soft and hard limit of a process's core files."""
    found = re.search(
        r"Max core file size +([0-9]+|unlimited) +([0-9]+|unlimited)", Path(f"/proc/{pid}/limits").read_text()
    )
    assert found
    return found[1], found[2]
