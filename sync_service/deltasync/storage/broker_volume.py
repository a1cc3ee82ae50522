"""The brokers, as the volume that logs are on."""

from pathlib import Path

from deltasync.core.durations import Durations
from deltasync.storage.jetstream_errors import LOOK_AT_BROKERS
from deltasync.storage.volume import Refusal, Volume


class BrokerVolume(Volume):
    """A `Volume` without a folder: what is wrong with it, logs say themselves.

    Attributes:
        commits: how long it took until writes were acknowledged.
        troubles: what is wrong, by model.
    """

    def __init__(self, brokers: str) -> None:
        super().__init__("log", Path("/"))
        self._brokers = brokers
        self.commits = Durations()
        self.troubles = dict[str, str]()

    @property
    def trouble(self) -> str:
        """What is wrong with it, and what to do; empty if nothing is."""
        found = {each.removesuffix(f": {LOOK_AT_BROKERS}") for each in self.troubles.values() if each}
        if not found:
            return ""
        return f"log of {self._brokers}: {'; '.join(sorted(found))}: {LOOK_AT_BROKERS}; what is submitted waits"

    @property
    def free_bytes(self) -> None:
        """What brokers have left is theirs to say."""

    def has_file(self, _path: Path) -> bool:
        """None of the service's files is there."""
        return False

    def probe(self, _refusal: Refusal) -> bool:
        """It is tried all the time."""
        return True
