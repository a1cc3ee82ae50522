"""What commands ask of all processes of a service: an answer, and who has had no part in it."""

from typing import Any

import click

from deltasync.client.endpoint import Endpoint
from deltasync.client.route import Route


class Asking:
    """Asks a service over HTTP, and remembers which of its processes have not answered.

    Attributes:
        missing: their names; empty where all have.
    """

    def __init__(self, http: Endpoint) -> None:
        self.http = http
        self.missing = ""

    def get(self, path: str) -> Any:
        """The JSON answer of all processes to a GET of `path`."""
        answer = Route(self.http).get_answer(path)
        self.missing = answer.missing or self.missing
        return answer.value

    def say_missing(self) -> None:
        """Say who has not answered, if there are any; not to where the answer goes."""
        if self.missing:
            text = f"What these processes have is not in here, they did not answer: {self.missing}"
            click.echo(f"{text}; deltasync processes shows who is alive", err=True)
