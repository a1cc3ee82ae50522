"""Manage a service from a program, over HTTP."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import quote

from deltasync.base.errors import InvalidInput, Owner, ServiceUnavailable
from deltasync.client.endpoint import Endpoint, Route
from deltasync.core.policy import Policy
from deltasync.core.rows import row_ids

_DAY_SECONDS, _WEEK_SECONDS = 86_400.0, 7 * 86_400.0


class Admin:
    """Manage the consumers, models, rows and processes of a service over HTTP. Needs `deltasync[service]`.

    Each call opens a connection. Answers are dicts, or lists of dicts, with the keys in the service's
    /openapi.json. `timeout_seconds` limits the duration of a call.

    Every method raises NotFound if the service does not know what an argument names, NotPermitted without the role
    that it needs, and ServiceUnavailable if the service cannot be reached.
    """

    def __init__(self, service: Endpoint | str) -> None:
        """Use the service at an endpoint.

        Args:
            service: its HTTP endpoint, with a token or a certificate of role admin. Lists that need no role also
                work with a plain http://HOST:PORT.

        Raises:
            InvalidInput: the address is not http://HOST:PORT or https://HOST:PORT.
        """
        self._endpoint = Endpoint.of_http(service)

    def create_consumer(self, name: str, model: str, policy: Policy) -> dict[str, Any]:
        """Create a consumer. Creating the same one again changes nothing.

        Returns:
            The consumer. It is paused if a version of the model is in quarantine.

        Raises:
            InvalidInput: the name is not valid, or the policy does not suit the model's tables.
            Contradiction: the consumer exists for another model, or with another policy.
        """
        body = {"name": name, "model": model, "policy": policy.as_dict()}
        return self._object("POST", "/consumers", body)

    def update_consumer(self, name: str, policy: Policy) -> dict[str, Any]:
        """Give a consumer another policy; its replicas keep their offsets.

        Raises:
            InvalidInput: the policy does not suit the model's tables.
        """
        return self._object("PUT", f"{_consumer(name)}/policy", policy.as_dict())

    def consumer(self, name: str) -> dict[str, Any]:
        """A consumer: its state, its lag and its policy, its replicas and its tables.

        Raises:
            ServiceUnavailable: its model is still recovering.
        """
        return self._object("GET", _consumer(name))

    def delete_consumer(self, name: str) -> None:
        """Delete a consumer with its offsets and its view."""
        self._ask("DELETE", _consumer(name))

    def pause_consumer(self, name: str, reason: str = "") -> None:
        """Keep a consumer's replicas at their version until the consumer is resumed.

        Raises:
            InvalidInput: the reason has more than 400 characters or several lines.
        """
        self._ask("PUT", f"{_consumer(name)}/pause", {"reason": reason})

    def resume_consumer(self, name: str) -> None:
        """Resume a paused consumer: its replicas get the current rows."""
        self._ask("DELETE", f"{_consumer(name)}/pause")

    def follow_version(self, consumer: str, version: str | int) -> None:
        """Let a consumer's replicas get exactly a kept version until it follows another one.

        Args:
            version: the name or number of a kept version of its model; "live" = the newest version again.
        """
        self._ask("PUT", f"{_consumer(consumer)}/version", {"version": str(version)})

    def follow_consumer(
        self,
        consumer: str,
        after: str,
        behind_seconds: float,
        on_objection: Literal["stay", "back"] = "stay",
        version: str | int = "",
    ) -> str:
        """Let a consumer follow another one at a distance.

        Its replicas get the newest kept version that all replicas of the other consumer have held exactly, if
        these have gone on for that long since without an objection.

        Args:
            after: the name of the other consumer, of the same model.
            behind_seconds: the distance.
            on_objection: whether to stay at the version on an objection, or to go back to the one before.
            version: the first version; empty = the one that it follows, or the newest one that the other consumer
                allows.

        Returns:
            What it follows now, in words.

        Raises:
            NotFound: no such consumer or kept version, or the other consumer allows none yet.
            Contradiction: both would follow each other, or they have different models.
            InvalidInput: the distance is longer than the service stores what consumers served.
        """
        distance = {"after": after, "behind_seconds": behind_seconds, "on_objection": on_objection}
        body = {**distance, "version": str(version)}
        return str(self._object("PUT", f"{_consumer(consumer)}/version", body)["follows"])

    def object(self, consumer: str, reason: str) -> None:
        """Raise an objection to what a consumer serves: consumers that follow it get no later version.

        Raises:
            InvalidInput: the reason is empty, has more than 400 characters or several lines.
        """
        self._ask("POST", f"{_consumer(consumer)}/object", {"reason": reason})

    def withdraw_objection(self, consumer: str) -> None:
        """Withdraw the objection of a consumer."""
        self._ask("DELETE", f"{_consumer(consumer)}/object")

    def history(self, consumer: str, since_seconds: float = 3600.0, last: int = 1000) -> list[dict[str, Any]]:
        """The history of a consumer: which version each replica served, by time, oldest first.

        Args:
            since_seconds: how far to look back.
            last: the maximum number of lines; the newest ones count.
        """
        return list(self.history_lines(consumer, since_seconds, last))

    def history_lines(
        self, consumer: str, since_seconds: float = 3600.0, last: int = 1000
    ) -> Iterator[dict[str, Any]]:
        """The lines of `history` one by one, for histories that should not be in memory at once."""
        path = f"{_consumer(consumer)}/history?since_seconds={since_seconds:.15g}"
        after = ""
        while True:
            page = self._object("GET", f"{path}&last={last}{after}")
            yield from page["lines"]
            if page["next_ns"] is None:
                return
            last, after = last - len(page["lines"]), f"&from_ns={page['next_ns']}"

    def forget_replica(self, consumer: str, replica: str) -> None:
        """Forget a disconnected replica, which then no longer counts for lag.

        Raises:
            Contradiction: the replica is connected.
        """
        self._ask("DELETE", _replica(consumer, replica))

    def delete_model(self, name: str) -> None:
        """Delete a model with its tables, log and checkpoints.

        Raises:
            Contradiction: a rank publishes the model, or a consumer follows it.
        """
        self._ask("DELETE", _model(name))

    def give_up_model(self, name: str) -> None:
        """Remove the log of a model that the service cannot recover. Its trainer then publishes every row.

        Raises:
            ServiceUnavailable: it is still recovering, and may succeed.
            Contradiction: it is recovered.
        """
        self._ask("POST", f"{_model(name)}/give-up")

    def delete_table(self, model: str, table: str) -> None:
        """Delete a table of a model. Replicas no longer get it.

        Raises:
            Contradiction: a rank publishes the table, another table belongs to it, or consumers that are paused
                or follow a kept version may have it.
        """
        self._ask("DELETE", f"{_model(model)}/tables/{_quoted(table)}")

    def consumers(self) -> list[dict[str, Any]]:
        """All consumers of all processes, sorted by name."""
        return owners_lines(self._of_each("GET", "/consumers"), "consumer")

    def delete_rows(self, model: str, table: str, ids: Iterable[int]) -> dict[str, Any]:
        """Delete rows from the trainer, the service and all replicas.

        When this returns, the request is durable, and it stays pending until the trainer deletes the rows with one
        of its next cuts. Not every trainer supports deletes.

        Args:
            table: one of its embedding tables.
            ids: 1 to 100,000 global row ids, integers in any order.

        Returns:
            The request: its number of rows, and what it waits for.

        Raises:
            InvalidInput: no ids or too many, an id that is no integer or outside of the table, or not an embedding
                table.
            Contradiction: too many deletes of the model are pending.
        """
        rows = row_ids(table, ids).tolist()
        return self._object("POST", "/deletes", {"model": model, "table": table, "ids": rows})

    def pending_deletes(self) -> list[dict[str, Any]]:
        """The pending deletes of all processes, each with the reason why it is pending."""
        return joined(self._of_each("GET", "/deletes"), "model", "asked_unix_ns")

    def backup(self, url: str, timeout_seconds: float = _WEEK_SECONDS) -> dict[str, Any]:
        """Back up a running service. Its log shows the progress.

        Args:
            url: a new or empty folder: an absolute path on the service's machine, or a URL of object storage.

        Returns:
            The models of the complete backup with their versions, and the size of their checkpoints in bytes.

        Raises:
            InvalidInput: the path is relative or inside the data directory, or the folder is not empty.
            Contradiction: another backup is running.
            StorageFailed: a file could not be read or written.
        """
        return self._object("POST", "/backup", {"url": url}, timeout_seconds)

    def fsck(self, timeout_seconds: float = _WEEK_SECONDS) -> list[dict[str, Any]]:
        """Check all data of the service for damage: checkpoints, logs and rows in memory.

        Each process logs its progress.

        Returns:
            A report for each model, and one with an empty name for the log: the data that was read, and the
            damage.
        """
        return [each for lines in self._of_each("POST", "/fsck", timeout_seconds) for each in lines]

    def verify_replica(self, consumer: str, replica: str, timeout_seconds: float = _DAY_SECONDS) -> dict[str, Any]:
        """Compare all rows of a replica with the service's. The service sends different rows again.

        Returns:
            The replica's version of the model, and the result for each table.

        Raises:
            Contradiction: the replica is disconnected, or has no rows yet.
        """
        return self._object("POST", f"{_replica(consumer, replica)}/verify", None, timeout_seconds)

    def make_checkpoint(self, model: str, timeout_seconds: float = _DAY_SECONDS) -> dict[str, Any]:
        """Write a checkpoint of a model now, and copy it to the service's URL for checkpoints if it has one.

        Returns:
            Version of the checkpoint, its bytes, and the bytes that are new in it.

        Raises:
            NotFound: no such model, or it has no version yet.
            StorageFailed: the checkpoint could not be written or copied.
        """
        return self._object("POST", f"{_model(model)}/checkpoint", None, timeout_seconds)

    def keep_version(self, model: str, name: str = "", timeout_seconds: float = _DAY_SECONDS) -> dict[str, Any]:
        """Keep the newest version of a model: write a checkpoint that stays until the version is released.

        Args:
            name: a name for the version; may be empty.

        Returns:
            The kept version.

        Raises:
            NotFound: no such model, or nothing of it is published.
            Contradiction: another kept version of the model has the name.
            StorageFailed: the checkpoint could not be written or copied.
        """
        return self._object("POST", f"{_model(model)}/versions", {"name": name}, timeout_seconds)

    def kept_versions(self, model: str) -> list[dict[str, Any]]:
        """The kept versions of a model, oldest first."""
        lines: list[dict[str, Any]] = self._ask("GET", f"{_model(model)}/versions")
        return lines

    def release_version(self, model: str, version: str | int) -> None:
        """Stop keeping a version of a model, given by its name or number."""
        self._ask("DELETE", f"{_model(model)}/versions/{_quoted(str(version))}")

    def roll_back(
        self,
        model: str,
        version: str | int,
        timeout_seconds: float = _DAY_SECONDS,
        *,
        accept_any: bool = False,
    ) -> int:
        """Make the rows of a kept version the newest version of a model.

        Replicas of consumers that follow the newest version get them. Until the next version, trainers are refused
        unless they go on from that version or an earlier one: see `deltasync.trainer.load_export`.

        Args:
            version: the name or number of a kept version.
            accept_any: also admit trainers without a DeltaSync state, which publish all their rows.

        Returns:
            The number of the new version.

        Raises:
            Contradiction: the version belongs to a past that the model has discarded, for example after a restore.
            StorageFailed: the version cannot be read, or there is no room.
        """
        body = {"version": str(version), "accept_any": accept_any}
        return int(self._object("POST", f"{_model(model)}/rollback", body, timeout_seconds)["version"])

    def move_model(self, model: str, process: str, timeout_seconds: float = _DAY_SECONDS) -> None:
        """Move a model to another process of the service. The service writes a checkpoint first."""
        self._ask("POST", f"{_model(model)}/move", {"process": process}, timeout_seconds)

    def drain_process(self, process: str = "", timeout_seconds: float = _DAY_SECONDS) -> list[str]:
        """Move all models of a process to other processes. It gets no new ones until it is restarted.

        Args:
            process: its name. May be empty if the endpoint has a single address: the process at that address.

        Returns:
            The names of the models.

        Raises:
            InvalidInput: no name, and several addresses.
            Contradiction: no other process could own the models.
        """
        if not process and len(self._endpoint.alone()) > 1:
            raise InvalidInput("the endpoint has several addresses: name the process to drain")
        models: list[str] = self._object("POST", "/drain", {"process": process}, timeout_seconds)["models"]
        return models

    def _of_each(
        self, method: str, path: str, patience_seconds: float | None = None
    ) -> list[list[dict[str, Any]]]:
        """The lists of all processes; raises ServiceUnavailable if a process or a model's owner is missing."""
        processes = EachProcess(self._endpoint)
        answers = processes.answers(path, method, patience_seconds)
        for name, why in processes.missing.items():
            raise ServiceUnavailable(f"process {name} has not answered: {why}")
        for model in processes.unowned:
            raise ServiceUnavailable(f"model {model!r}: no live process owns it now; try again")
        return answers

    def _object(
        self, method: str, path: str, body: Any = None, patience_seconds: float | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask(method, path, body, patience_seconds)
        return answer

    def _ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        return Route(self._endpoint).ask(method, path, body, patience_seconds)


def _consumer(name: str) -> str:
    return f"/consumers/{_quoted(name)}"


def _replica(consumer: str, replica: str) -> str:
    return f"{_consumer(consumer)}/replicas/{_quoted(replica)}"


def _model(name: str) -> str:
    return f"/models/{_quoted(name)}"


def _quoted(name: str) -> str:
    try:
        quoted = quote(name, safe="")
        return quoted.replace(".", "%2E") if name in (".", "..") else quoted  # Otherwise part of a relative path.
    except UnicodeEncodeError as error:
        raise InvalidInput(f"name {name!r}: it has a lone surrogate, half of a character") from error


class EachProcess:
    """Asks all processes of a service over HTTP at once. The first one to answer lists the others.

    Attributes:
        http: the addresses of one or more of the processes.
        missing: the reasons why processes have not answered, by process.
        unowned: the models that no process owns; the answers lack them.
    """

    def __init__(self, http: Endpoint) -> None:
        self.http = http
        self.missing, self.unowned = dict[str, str](), list[str]()
        self._processes: dict[str, Endpoint] | None = None

    def answers(self, path: str, method: str = "GET", patience_seconds: float | None = None) -> list[Any]:
        """The JSON answers of all processes that can be reached; an error if one refuses, or if none can."""
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
        """Join the lists of all processes, sorted by the keys `by`."""
        return joined(self.answers(path), *by)

    def _alive(self) -> dict[str, Endpoint]:
        """The endpoints of the live processes, by name. The process that sent the list keeps the address asked."""
        if self._processes is None:
            answered, lines = self._listed()
            self.unowned = sorted({model for each in lines for model in each["unowned"]})
            self._processes = {}
            for each in lines:
                name, owner = str(each["process"]), Owner(str(each["process"]), "", str(each["http"]))
                try:
                    if each["alive"]:
                        self._processes[name] = answered if each["here"] else answered.at(owner)
                except InvalidInput as error:
                    self.missing[name] = str(error)
            self._processes = self._processes or {"": answered}
        return self._processes

    def _listed(self) -> tuple[Endpoint, list[dict[str, Any]]]:
        """The list of processes, and the endpoint that sent it: if possible, one in touch with all others."""
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


def joined(lists: Iterable[Iterable[dict[str, Any]]], *by: str) -> list[dict[str, Any]]:
    """Join the lists of several processes, sorted by the keys `by`."""
    return sorted((line for lines in lists for line in lines), key=lambda line: [line[name] for name in by])


def owners_lines(lists: Iterable[Iterable[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """Join the lists of several processes, sorted by the key `name`, with one line per name.

    If several processes have a line for a name, the owner's counts, which has a head.
    """
    lines = sorted(joined(lists, name), key=lambda line: line.get("head") is not None)
    return joined([{line[name]: line for line in lines}.values()], name)
