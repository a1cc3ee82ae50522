"""What the demo runs."""

from dataclasses import dataclass, field, replace

from deltasync.core.policy import Policy
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.clicks.training_options import TrainingOptions


@dataclass(frozen=True)
class Fleet:
    """A consumer and the names of its replicas, which no other fleet uses.

    Attributes:
        frozen: its replicas, predictors, take nothing more from half time on, and are not waited for.
    """

    consumer: str
    replicas: tuple[str, ...]
    policy: Policy
    frozen: bool = False

    @property
    def serves(self) -> bool:
        """Whether its replicas are predictors, with tables quantised as the policy says, which are asked over
        HTTP; the others score the stream by themselves.
        """
        return self.policy.value_type.tbe_bits is not None


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What to run.

    Attributes:
        stream: the events and the model.
        training: how it is trained.
        ranks: trainer processes.
        publish_every: steps between cuts.
        kill_service_at: kill the service with SIGKILL at this share of the steps; None = never.
        keep: keep the folder of logs and results.
        hold: keep everything up at the end, until Ctrl-C.
        policy: what the replicas are given.
        secure: have everything speak mutual TLS, and show who it is.
        brokers: NATS brokers that keep the log; 0 = the service keeps its own.
        services: processes of the service, which share the log of brokers.
        kill_broker_at: kill the broker that leads the model's log with SIGKILL at this share of the steps; None =
            never.
    """

    stream: StreamOptions
    training: TrainingOptions
    ranks: int = 2
    publish_every: int = 2
    kill_service_at: float | None = None
    keep: bool = False
    hold: bool = False
    policy: Policy = field(default_factory=Policy)
    secure: bool = False
    brokers: int = 0
    services: int = 1
    kill_broker_at: float | None = None

    @property
    def fleets(self) -> list[Fleet]:
        """What to run: the first one is compared with the trainer."""
        synced = Fleet("predictors", ("replica-0", "replica-1"), self.policy)
        if not synced.serves:
            return [synced]
        frozen = Fleet("frozen", ("replica-1",), self.policy, frozen=True)
        return [replace(synced, replicas=("replica-0",)), frozen]
