"""The processes of one service, as they tell each other of themselves."""

from dataclasses import dataclass

from deltasync.core.owner import Owner


@dataclass(frozen=True)
class Member:
    """A process of the service.

    Attributes:
        name: its name among the processes of the service.
        grpc: where others reach it by gRPC, HOST:PORT.
        http: where others reach it by HTTP, a URL.
        run: made anew each time it starts: tells two processes of one name apart.
        draining: it gives its models away, and takes none.
        models: how many it owns.
        started: when it was started, nanoseconds since 1970, by its own clock; for people.
    """

    name: str
    grpc: str
    http: str
    run: str = ""
    draining: bool = False
    models: int = 0
    started: int = 0

    def owner(self, epoch: int = 0) -> Owner:
        """It as the owner of a model."""
        return Owner(self.name, self.grpc, self.http, epoch)
