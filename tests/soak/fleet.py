"""What runs in a soak: models and who trains them, consumers and their replicas."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from deltasync.core.policy import Policy

PAIR, LONE, CLICKS = "pair", "lone", "clicks"


@dataclass(frozen=True)
class Follower:
    """A replica: its name, its consumer's, and what it puts rows into (`stores.STORES`)."""

    name: str
    consumer: str
    store: str


@dataclass(frozen=True)
class Subscription:
    """A consumer: of which model, with which policy, and what its replicas put rows into."""

    name: str
    model: str
    policy: Policy = field(default_factory=Policy)
    stores: Sequence[str] = ("numpy",)

    @property
    def replicas(self) -> list[Follower]:
        return [
            Follower(f"{self.name}-{store}-{number}", self.name, store) for number, store in enumerate(self.stores)
        ]


@dataclass(frozen=True)
class Fleet:
    """Everything that runs beside the service.

    Attributes:
        models: the ranks of each plain trainer, by model.
        clicks: the ranks of the TorchRec trainer; 0 = none.
        subscriptions: the consumers.
        storage: whether object storage gets copies of checkpoints.
    """

    models: dict[str, int]
    clicks: int
    subscriptions: list[Subscription]
    storage: bool = False

    @property
    def followers(self) -> list[Follower]:
        return [each for subscription in self.subscriptions for each in subscription.replicas]

    def replicas_of(self, models: Sequence[str]) -> list[str]:
        """The replicas that follow these models."""
        return [each.name for each in self.followers if self.subscription(each.consumer).model in models]

    def subscription(self, name: str) -> Subscription:
        return next(each for each in self.subscriptions if each.name == name)


CHANGING = "changing"
# What the consumer whose policy is changed has in turn.
POLICIES = (
    Policy(),
    Policy(top_k=40, max_age_seconds=4),
    Policy(tables=("users", "tags")),
    Policy(min_interval_seconds=0.3, max_bytes=30_000),
)


def fleet_of(*, small: bool, redis: bool, storage: bool) -> Fleet:
    """What runs: little, or every kind of trainer, consumer and target; also rows in a Redis server, and copies of
    checkpoints in object storage.
    """
    ranked = Subscription("ranked", PAIR, Policy(top_k=100, max_age_seconds=5))
    whole = Subscription("whole", PAIR, stores=("numpy", "keyed"))
    changing = Subscription(CHANGING, PAIR, POLICIES[0])
    if small:
        return Fleet({PAIR: 2, LONE: 1}, 0, [whole, ranked, changing, Subscription("lone", LONE)], storage)
    stored = ("redis",) if redis else ()
    return Fleet(
        {PAIR: 2, LONE: 1},
        2,
        [
            replace(whole, stores=(*whole.stores, *stored)),
            ranked,
            changing,
            Subscription("ids", PAIR, Policy.from_dict({"mode": "ids"}), stores=("ids",)),
            Subscription("int8", PAIR, Policy.from_dict({"value_type": "int8"})),
            Subscription("budget", PAIR, Policy(max_bytes=40_000, min_interval_seconds=0.5), stores=("keyed",)),
            Subscription("some", PAIR, Policy(tables=("users",))),
            Subscription("lone", LONE, stores=("numpy", "keyed")),
            Subscription("lone-ranked", LONE, Policy(top_k=0.1, max_age_seconds=5)),
            Subscription("clicks", CLICKS, stores=("torch",)),
        ],
        storage,
    )
