"""What each process of a service answers: a list of one process has only what that process owns."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import InvalidInput, ServiceUnavailable
from deltasync.core.owner import Owner

Line = dict[str, Any]


class EachProcess:
    """Asks each process of a service over HTTP, all at once. The first one that answers names the others.

    Attributes:
        http: where some of them, or one, are reached.
        missing: why a process has not answered, by its name; empty where all have.
        unowned: the models that no process has: no answer is about them.
    """

    def __init__(self, http: Endpoint) -> None:
        self.http = http
        self.missing, self.unowned = dict[str, str](), list[str]()
        self._processes: dict[str, Endpoint] | None = None

    def answers(self, path: str, method: str = "GET", patience_seconds: float | None = None) -> list[Any]:
        """The JSON answers of all processes to a request, but for those that cannot be reached.

        Raises:
            DeltasyncError: a process refuses to answer, or none can be reached.
        """
        processes = self._found()
        with ThreadPoolExecutor(len(processes), thread_name_prefix="each-process") as threads:
            asked = {
                name: threads.submit(each.ask, method, path, None, patience_seconds)
                for name, each in processes.items()
            }
        found, errors = list[Any](), list[ServiceUnavailable]()
        for name, answer in asked.items():
            try:
                found.append(answer.result())
            except ServiceUnavailable as error:
                errors.append(error)
                self.missing[name] = str(error)
        if not found:
            raise errors[0]
        return found

    def lines(self, path: str, *by: str) -> list[Line]:
        """The lists of all processes in one, sorted by some keys."""
        return joined(self.answers(path), *by)

    def _found(self) -> dict[str, Endpoint]:
        """Where each process that is alive is asked, by its name."""
        if self._processes is None:
            answered, lines = self._listed()
            self.unowned = sorted({model for each in lines for model in each["unowned"]})
            self._processes = self._named([each for each in lines if each["alive"]], answered)
        return self._processes

    def _listed(self) -> tuple[Endpoint, list[Line]]:
        """The processes, as one of them sees them that hears the others; or as any does, where none is such."""
        found: tuple[Endpoint, list[Line]] | None = None
        error = ServiceUnavailable()
        for each in self.http.alone():
            try:
                lines = each.get_json("/processes")
            except ServiceUnavailable as failure:
                error = failure
                continue
            if all(line["confirmed"] for line in lines):
                return each, lines
            found = found or (each, lines)
        if found is None:
            raise error
        return found

    def _named(self, lines: list[Line], answered: Endpoint) -> dict[str, Endpoint]:
        """The one that has answered is asked where it was reached: its own address may be one for others alone."""
        found = dict[str, Endpoint]()
        for each in lines:
            name, http = str(each["process"]), str(each["http"])
            try:
                found[name] = answered if each["here"] else answered.at(Owner(name, "", http))
            except InvalidInput as error:
                self.missing[name] = str(error)
        return found or {"": answered}


def joined(lists: Iterable[Iterable[Line]], *by: str) -> list[Line]:
    """Lists of several processes in one, sorted by some keys."""
    return sorted((line for lines in lists for line in lines), key=lambda line: [line[name] for name in by])


def known(lists: Iterable[Iterable[Line]], name: str) -> list[Line]:
    """Lists of several processes in one, sorted by name, with one line for each name: the one with a head, of the
    owner, where others only know that there is such a thing.
    """
    lines = sorted(joined(lists, name), key=lambda line: line.get("head") is not None)
    return joined([{line[name]: line for line in lines}.values()], name)
