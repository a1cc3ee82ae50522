"""What operators read and change, from a program."""

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from deltasync.client.each_process import EachProcess, Line, joined
from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import InvalidInput, ServiceUnavailable
from deltasync.core.policy import Policy

_DAY_SECONDS, _WEEK_SECONDS = 86_400.0, 7 * 86_400.0


class Admin:
    """Manages the consumers, models, rows and processes of a service over HTTP. Each call connects anew.

    Answers are dicts and lists of these, with the keys that the service's /docs describes. Every method raises
    NotPermitted without the role that it needs, and ServiceUnavailable where the service cannot be reached.
    """

    def __init__(self, service: Endpoint | str) -> None:
        """Ask the service at an endpoint.

        Args:
            service: where it answers HTTP, with a token or a certificate that has role admin; an address alone,
                http://HOST:PORT, is enough for a list where nobody needs a role for that.

        Raises:
            InvalidInput: the address is not http://HOST:PORT or https://HOST:PORT.
        """
        self._endpoint = Endpoint.of_http(service)

    def create_consumer(self, name: str, model: str, policy: Policy) -> dict[str, Any]:
        """Make a consumer; making an equal one again changes nothing.

        Returns:
            The consumer: paused, where a version of the model is in quarantine.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
        """
        body = {"name": name, "model": model, "policy": policy.as_dict()}
        return self._object("POST", "/consumers", body)

    def update_consumer(self, name: str, policy: Policy) -> dict[str, Any]:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        return self._object("PUT", f"{_consumer(name)}/policy", policy.as_dict())

    def consumer(self, name: str) -> dict[str, Any]:
        """A consumer: its model, policy and replicas.

        Raises:
            NotFound: there is none of that name.
        """
        return self._object("GET", _consumer(name))

    def delete_consumer(self, name: str) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: there is none of that name.
        """
        self._ask("DELETE", _consumer(name))

    def pause_consumer(self, name: str, reason: str = "") -> None:
        """Hold a consumer's replicas at what they have, whatever is published, until it is resumed.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a reason of more than 400 characters, or of several lines.
        """
        self._ask("PUT", f"{_consumer(name)}/pause", {"reason": reason})

    def resume_consumer(self, name: str) -> None:
        """Let a paused consumer go on, with all that its replicas lack.

        Raises:
            NotFound: there is none of that name.
        """
        self._ask("DELETE", f"{_consumer(name)}/pause")

    def forget_replica(self, consumer: str, replica: str) -> None:
        """Forget a replica that is away: no lag counts it any more.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is connected.
        """
        self._ask("DELETE", _replica(consumer, replica))

    def delete_model(self, name: str) -> None:
        """Delete a model, with its tables and all that is kept of it.

        Raises:
            NotFound: there is none of that name.
            Contradiction: a rank publishes it, or a consumer follows it.
        """
        self._ask("DELETE", _model(name))

    def delete_table(self, model: str, table: str) -> None:
        """Delete a table of a model; replicas are not sent it any more.

        Raises:
            NotFound: there is no such model, or no such table in it.
            Contradiction: a rank publishes it, or another table belongs to it.
        """
        self._ask("DELETE", f"{_model(model)}/tables/{quote(table, safe='')}")

    def consumers(self) -> list[dict[str, Any]]:
        """All consumers of all processes, by name."""
        return self._lines("/consumers", "consumer")

    def delete_rows(self, model: str, table: str, ids: Iterable[int]) -> dict[str, Any]:
        """Delete rows: of the trainer, of the service and of all replicas.

        The request is durable once this returns. The trainer meets it with one of its next cuts; while there is
        none that can, it is pending.

        Args:
            model: the model.
            table: one of its embedding tables.
            ids: global row ids, in any order: 1 to 100,000 of them.

        Returns:
            The delete: how many rows, and what it waits for.

        Raises:
            NotFound: no such model, or no such table in it.
            InvalidInput: no ids or too many, an id outside of the table, or a table that is none of embeddings.
            Contradiction: too many deletes of the model are pending.
        """
        wanted = [int(each) for each in ids]
        if wanted and min(wanted) < 0:
            raise InvalidInput(f"row {min(wanted)} of table {table!r}: rows count from 0")
        return self._object("POST", "/deletes", {"model": model, "table": table, "ids": wanted})

    def pending_deletes(self) -> list[dict[str, Any]]:
        """The deletes that are asked for and not done, of all processes; each with what it waits for."""
        return self._lines("/deletes", "model", "asked_unix_ns")

    def backup(self, url: str, timeout_seconds: float = _WEEK_SECONDS) -> dict[str, Any]:
        """Copy everything that the service keeps, while it goes on. Its log shows the progress.

        Args:
            url: a folder, as an absolute path on the service's machine, or a URL of object storage: new or empty.
            timeout_seconds: how long it may take.

        Returns:
            Files and bytes of the backup, once it is complete.

        Raises:
            InvalidInput: the path is relative or inside the data directory, or the place is not empty.
            Contradiction: another backup is being made.
            StorageFailed: something could not be read or written.
        """
        return self._object("POST", "/backup", {"url": url}, timeout_seconds)

    def fsck(self, timeout_seconds: float = _WEEK_SECONDS) -> list[dict[str, Any]]:
        """Read everything that the service keeps: checkpoints, log and rows in memory.

        Each process logs its progress.

        Args:
            timeout_seconds: how long it may take.

        Returns:
            For each model what was read and what is damaged; last, with an empty name, what belongs to no model.
        """
        return [each for lines in self._of_each("POST", "/fsck", timeout_seconds) for each in lines]

    def verify_replica(self, consumer: str, replica: str, timeout_seconds: float = _DAY_SECONDS) -> dict[str, Any]:
        """Make a replica read again all rows that it holds; the service sends those that differ again.

        Args:
            consumer: the name of its consumer.
            replica: its name.
            timeout_seconds: how long it may take.

        Returns:
            The model's version that it holds, and how each table compares with what the replica was sent.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is away, or holds nothing yet.
        """
        return self._object("POST", f"{_replica(consumer, replica)}/verify", None, timeout_seconds)

    def make_checkpoint(self, model: str, timeout_seconds: float = _DAY_SECONDS) -> dict[str, Any]:
        """Write a checkpoint of a model now, and copy it to the service's URL for checkpoints if it has one.

        Args:
            model: the model.
            timeout_seconds: how long it may take.

        Returns:
            Version, bytes and new bytes of the checkpoint.

        Raises:
            NotFound: no such model, or nothing of it is published.
            StorageFailed: it could not be written, or not copied.
        """
        return self._object("POST", f"{_model(model)}/checkpoint", None, timeout_seconds)

    def move_model(self, model: str, process: str, timeout_seconds: float = _DAY_SECONDS) -> None:
        """Give a model to another process of the service.

        Args:
            model: the model.
            process: the name of that process.
            timeout_seconds: how long it may take: a checkpoint is written first.

        Raises:
            NotFound: no such model, or no such process.
        """
        self._ask("POST", f"{_model(model)}/move", {"process": process}, timeout_seconds)

    def drain_process(self, process: str = "", timeout_seconds: float = _DAY_SECONDS) -> list[str]:
        """Give all models of a process to others. It takes none any more until it is started again.

        Args:
            process: its name; empty is the one at the address, where the endpoint has a single one.
            timeout_seconds: how long it may take.

        Returns:
            The names of these models.

        Raises:
            InvalidInput: no name, and several addresses.
            NotFound: no such process.
            Contradiction: there is no other that could have them.
        """
        if not process and len(self._endpoint.alone()) > 1:
            raise InvalidInput("which process is to be drained? The endpoint has several addresses: give a name")
        models: list[str] = self._object("POST", "/drain", {"process": process}, timeout_seconds)["models"]
        return models

    def _lines(self, path: str, *by: str) -> list[dict[str, Any]]:
        """A list of all processes: a program is not to take a part of it for everything."""
        return joined(self._of_each("GET", path), *by)

    def _of_each(self, method: str, path: str, patience_seconds: float | None = None) -> list[list[Line]]:
        """The lists that all processes answer with. Raises ServiceUnavailable where one does not."""
        processes = EachProcess(self._endpoint)
        answers = processes.answers(path, method, patience_seconds)
        for name, why in processes.missing.items():
            raise ServiceUnavailable(f"process {name} has not answered: {why}")
        for model in processes.unowned:
            raise ServiceUnavailable(f"model {model!r}: no process that is alive has it; try again")
        return answers

    def _object(
        self, method: str, path: str, body: Any = None, patience_seconds: float | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = self._ask(method, path, body, patience_seconds)
        return found

    def _ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        return Route(self._endpoint).ask(method, path, body, patience_seconds)


def _consumer(name: str) -> str:
    return f"/consumers/{quote(name, safe='')}"


def _replica(consumer: str, replica: str) -> str:
    return f"{_consumer(consumer)}/replicas/{quote(replica, safe='')}"


def _model(name: str) -> str:
    return f"/models/{quote(name, safe='')}"
