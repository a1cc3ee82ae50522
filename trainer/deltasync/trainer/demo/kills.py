"""What the demo kills at which step."""

from collections.abc import Callable

from deltasync.core.errors import DeltasyncError
from deltasync.trainer.demo.brokers import Broker, Brokers
from deltasync.trainer.demo.options import DemoOptions
from deltasync.trainer.demo.services import Services

_STREAM = "deltasync_clicks"
_MODEL = "clicks"


class Kills:
    """Kills the service, or a broker, once the trainer has come so far."""

    def __init__(
        self,
        options: DemoOptions,
        steps: int,
        service: Services,
        brokers: Brokers | None,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._steps, self._service, self._brokers, self._say = options, steps, service, brokers, say
        self._killed: Broker | None = None
        self._done = set[str]()

    def look(self, step: int) -> None:
        """Kill what is to be killed by a step; start a broker again that was killed at the last look."""
        if self._killed and self._brokers:
            self._brokers.start(self._killed)
            self._say(f"step {step}: {self._killed.name} was started again")
            self._killed = None
        if self._is_due("service", self._options.kill_service_at, step):
            self._kill_service(step)
        if self._brokers and self._is_due("broker", self._options.kill_broker_at, step):
            self._kill_broker(self._brokers, step)

    def _kill_service(self, step: int) -> None:
        try:
            name = self._service.kill_owner(_MODEL)
        except DeltasyncError:  # Nobody owns the model just now: at the next look.
            return
        self._done.add("service")
        self._say(f"step {step}: the {name} was killed with SIGKILL")

    def _kill_broker(self, brokers: Brokers, step: int) -> None:
        if leader := brokers.leader(_STREAM):
            brokers.kill(leader)
            self._killed = leader
            self._done.add("broker")
            self._say(f"step {step}: {leader.name}, which led the log, was killed with SIGKILL")

    def _is_due(self, what: str, share: float | None, step: int) -> bool:
        return what not in self._done and share is not None and step >= share * self._steps
