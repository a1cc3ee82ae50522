"""What the hash `meta` of a store says."""

from deltasync.client.keyed.redis_layout import Meta
from deltasync.core.position import Position

META = Meta("clicks", (), Position("h", 7, seal=2**64 - 1), version=7)


def _read(fields: dict[str, str]) -> Meta | None:
    return Meta.of_fields({name.encode(): value.encode() for name, value in fields.items()}, "the store")


def test_a_position_has_its_seal_in_the_store() -> None:
    found = _read(META.fields())
    assert found == META
    assert found.position.seal == META.position.seal
