"""Sizes of the click model."""

from dataclasses import dataclass

from deltasync.trainer.checks import check_whole
from deltasync.trainer.clicks.features import HOURS_OF_WEEK, RAW_IDS

# Features by managed table. Histories have no table of their own: of a table's ids TorchRec notes as many as the
# first batch has, which has no history.
MANAGED = {"user": ["user"], "item": ["item", "history"]}
# A managed table has a row for one id in so many.
_IDS_PER_ROW = 4


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the model, and whether it maps raw ids itself.

    Attributes:
        users: users there are, and rows of the user table; a managed one has a fourth of them.
        items: likewise, of the item table and of the table of histories; a managed item table has both.
        cross_buckets: rows of the table of user-item crosses.
        dim: values per row, the same in all tables; even.
        hidden: width of the hidden layers.
        managed: ids of users and items are raw and get rows by managed collision; and the dense features are
            normalised by batch.
    """

    users: int = 20_000
    items: int = 12_000
    cross_buckets: int = 10_000
    dim: int = 16
    hidden: int = 32
    managed: bool = False

    def __post_init__(self) -> None:
        for name, value in self.sizes.items():
            check_whole(name, value, least=2)
        if self.dim % 2:
            raise ValueError(f"dim: {self.dim}, expected an even number: one table is sharded by columns")

    @property
    def sizes(self) -> dict[str, int]:
        """The options that are sizes, by name."""
        return {name: value for name, value in vars(self).items() if name != "managed"}

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same to another process."""
        sizes = [(f"--{name.replace('_', '-')}", str(value)) for name, value in self.sizes.items()]
        return [argument for pair in sizes for argument in pair] + ["--managed"] * self.managed

    @property
    def managed_tables(self) -> tuple[str, ...]:
        """Tables whose rows are given to raw ids."""
        return tuple(MANAGED) if self.managed else ()

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table, which are named after features."""
        rest = {"cross": self.cross_buckets, "hour": HOURS_OF_WEEK}
        if self.managed:
            return {"user": -(-self.users // _IDS_PER_ROW), "item": -(-self.items // _IDS_PER_ROW), **rest}
        return {"user": self.users, "item": self.items, **rest, "history": self.items}

    @property
    def ids(self) -> dict[str, int]:
        """How many ids there are of each sparse feature: they are from 0 up to there."""
        raw = {name: RAW_IDS for table in self.managed_tables for name in MANAGED[table]}
        return {**self.rows, **raw}
