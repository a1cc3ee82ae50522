"""What operators read and change from a program, over HTTP."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from deltasync.base.errors import InvalidInput, Owner, ServiceUnavailable
from deltasync.client.endpoint import Endpoint, Route
from deltasync.core.policy import Policy

__all__ = ["fetch_lag"]

_DAY_SECONDS, _WEEK_SECONDS = 86_400.0, 7 * 86_400.0


class Admin:
    """Manages the consumers, models, rows and processes of a service over HTTP. Each call connects anew.

    Answers are dicts and lists of these, with the keys that the service's /docs describes. Every method raises
    NotPermitted without the role that it needs, and ServiceUnavailable if the service cannot be reached.
    """

    def __init__(self, service: Endpoint | str) -> None:
        """Ask the service at an endpoint.

        Args:
            service: where it answers HTTP, with a token or a certificate of role admin. An address alone,
                http://HOST:PORT, is enough for lists that need no role.

        Raises:
            InvalidInput: the address is not http://HOST:PORT or https://HOST:PORT.
        """
        self._endpoint = Endpoint.of_http(service)

    def create_consumer(self, name: str, model: str, policy: Policy) -> dict[str, Any]:
        """Make a consumer; making an equal one again changes nothing.

        Returns:
            The consumer: paused if a version of the model is in quarantine.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
        """
        body = {"name": name, "model": model, "policy": policy.as_dict()}
        return self._object("POST", "/consumers", body)

    def update_consumer(self, name: str, policy: Policy) -> dict[str, Any]:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: no such consumer.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        return self._object("PUT", f"{_consumer(name)}/policy", policy.as_dict())

    def consumer(self, name: str) -> dict[str, Any]:
        """A consumer: its model, policy and replicas.

        Raises:
            NotFound: no such consumer.
        """
        return self._object("GET", _consumer(name))

    def delete_consumer(self, name: str) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: no such consumer.
        """
        self._ask("DELETE", _consumer(name))

    def pause_consumer(self, name: str, reason: str = "") -> None:
        """Keep a consumer's replicas at their version, whatever is published, until it is resumed.

        Raises:
            NotFound: no such consumer.
            InvalidInput: a reason of more than 400 characters, or of several lines.
        """
        self._ask("PUT", f"{_consumer(name)}/pause", {"reason": reason})

    def resume_consumer(self, name: str) -> None:
        """Let a paused consumer go on: replicas get the current rows.

        Raises:
            NotFound: no such consumer.
        """
        self._ask("DELETE", f"{_consumer(name)}/pause")

    def forget_replica(self, consumer: str, replica: str) -> None:
        """Forget a replica that is away: lag no longer counts it.

        Raises:
            NotFound: there is no such consumer, or no such replica of it.
            Contradiction: it is connected.
        """
        self._ask("DELETE", _replica(consumer, replica))

    def delete_model(self, name: str) -> None:
        """Delete a model with its tables, log and checkpoints.

        Raises:
            NotFound: no such model.
            Contradiction: a rank publishes it, or a consumer follows it.
        """
        self._ask("DELETE", _model(name))

    def delete_table(self, model: str, table: str) -> None:
        """Delete a table of a model; replicas no longer get it.

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

        The request is durable once this returns. The trainer meets it with one of its next cuts. It is pending
        until a trainer that can meet it publishes.

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
        rows = [int(each) for each in ids]
        if rows and min(rows) < 0:
            raise InvalidInput(f"row {min(rows)} of table {table!r}: rows count from 0")
        return self._object("POST", "/deletes", {"model": model, "table": table, "ids": rows})

    def pending_deletes(self) -> list[dict[str, Any]]:
        """The pending deletes of all processes; each with what it waits for."""
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
        """One list of those of all processes; raises what `_of_each` does."""
        return joined(self._of_each("GET", path), *by)

    def _of_each(
        self, method: str, path: str, patience_seconds: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """The lists of all processes. Raises ServiceUnavailable if one is missing: a part is not the whole."""
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


def fetch_lag(service: Endpoint | str, consumer: str) -> dict[str, Any]:
    """The service's answer to GET /consumers/<consumer>/lag.

    Raises:
        InvalidInput: `service` is no address of HTTP.
        NotFound: no such consumer.
        ServiceUnavailable: the service does not answer, or not with a lag.
    """
    lag: dict[str, Any] = Route(Endpoint.of_http(service)).ask("GET", f"{_consumer(consumer)}/lag")
    return lag


def _consumer(name: str) -> str:
    return f"/consumers/{quote(name, safe='')}"


def _replica(consumer: str, replica: str) -> str:
    return f"{_consumer(consumer)}/replicas/{quote(replica, safe='')}"


def _model(name: str) -> str:
    return f"/models/{quote(name, safe='')}"


class EachProcess:
    """Asks every process of a service over HTTP, all at once. The first one that answers names the others.

    Attributes:
        http: the address of a process, or of several.
        missing: why a process has not answered, by its name; empty if all have.
        unowned: the models that no process owns: no answer is about them.
    """

    def __init__(self, http: Endpoint) -> None:
        self.http = http
        self.missing, self.unowned = dict[str, str](), list[str]()
        self._processes: dict[str, Endpoint] | None = None

    def answers(self, path: str, method: str = "GET", patience_seconds: float | None = None) -> list[Any]:
        """The JSON answers of all processes to a request, except those that cannot be reached.

        Raises:
            DeltasyncError: a process refuses to answer, or none can be reached.
        """
        processes = self._alive()
        with ThreadPoolExecutor(len(processes), thread_name_prefix="each-process") as threads:
            asked = {
                name: threads.submit(each.ask, method, path, None, patience_seconds)
                for name, each in processes.items()
            }
        answers, errors = list[Any](), list[ServiceUnavailable]()
        for name, answer in asked.items():
            try:
                answers.append(answer.result())
            except ServiceUnavailable as error:
                errors.append(error)
                self.missing[name] = str(error)
        if not answers:
            raise errors[0]
        return answers

    def lines(self, path: str, *by: str) -> list[dict[str, Any]]:
        """The lists of all processes in one, sorted by some keys."""
        return joined(self.answers(path), *by)

    def _alive(self) -> dict[str, Endpoint]:
        """The endpoints of the processes that are alive, by name."""
        if self._processes is None:
            answered, lines = self._listed()
            self.unowned = sorted({model for each in lines for model in each["unowned"]})
            self._processes = self._named([each for each in lines if each["alive"]], answered)
        return self._processes

    def _listed(self) -> tuple[Endpoint, list[dict[str, Any]]]:
        """The processes as one reports them that hears the others, or as any does if there is no such one."""
        report: tuple[Endpoint, list[dict[str, Any]]] | None = None
        error = ServiceUnavailable()
        for each in self.http.alone():
            try:
                lines = each.ask("GET", "/processes")
            except ServiceUnavailable as failure:
                error = failure
                continue
            if all(line["confirmed"] for line in lines):
                return each, lines
            report = report or (each, lines)
        if report is None:
            raise error
        return report

    def _named(self, lines: list[dict[str, Any]], answered: Endpoint) -> dict[str, Endpoint]:
        """The endpoints of processes; for the one that answered, the address at which it did."""
        endpoints = dict[str, Endpoint]()
        for each in lines:
            name, http = str(each["process"]), str(each["http"])
            try:
                endpoints[name] = answered if each["here"] else answered.at(Owner(name, "", http))
            except InvalidInput as error:
                self.missing[name] = str(error)
        return endpoints or {"": answered}


def joined(lists: Iterable[Iterable[dict[str, Any]]], *by: str) -> list[dict[str, Any]]:
    """One list of those of several processes, sorted by some keys."""
    return sorted((line for lines in lists for line in lines), key=lambda line: [line[name] for name in by])


def owners_lines(lists: Iterable[Iterable[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """One list of those of several processes, sorted by name, with one line for each name.

    Several processes may have a line of that name. The owner's has a head.
    """
    lines = sorted(joined(lists, name), key=lambda line: line.get("head") is not None)
    return joined([{line[name]: line for line in lines}.values()], name)
