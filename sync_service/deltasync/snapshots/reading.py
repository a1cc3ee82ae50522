"""The snapshots that there are of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from deltasync.core.errors import StorageFailed
from deltasync.core.progress import Progress
from deltasync.snapshots.manifest import DATA, MANIFESTS, Manifest, SnapshotDamaged, unpack_manifest
from deltasync.snapshots.packing import read_piece
from deltasync.snapshots.place import SnapshotPlace


@dataclass(frozen=True)
class Snapshots:
    """Those of a model, newest first; and what is wrong with those that cannot be read."""

    manifests: list[Manifest]
    problems: list[str]


def models_of(place: SnapshotPlace) -> list[str]:
    """The models that there are snapshots of.

    Raises:
        StorageFailed: they cannot be listed.
    """
    return [each.name for each in place.names("") if place.names(f"{each.name}/{MANIFESTS}")]


def snapshots_of(place: SnapshotPlace, model: str) -> Snapshots:
    """The snapshots of a model.

    Raises:
        StorageFailed: they cannot be listed, or one not be read now.
    """
    found = Snapshots([], [])
    for each in reversed(place.names(f"{model}/{MANIFESTS}")):
        try:
            found.manifests.append(unpack_manifest(each.name, place.get(each.name)))
        except SnapshotDamaged as error:
            found.problems.append(str(error))
    found.manifests.sort(key=lambda manifest: manifest.made_unix_ns, reverse=True)
    return found


def check_snapshot(place: SnapshotPlace, manifest: Manifest) -> list[str]:
    """What is wrong with a snapshot, in words: every piece is read."""
    problems, pieces = [], dict.fromkeys(manifest.pieces)
    progress = Progress(f"{manifest.name}: comparing with checksums", sum(each.bytes for each in pieces), "bytes")
    for piece in pieces:
        try:
            read_piece(place, piece)
        except StorageFailed as error:
            problems.append(str(error))
        progress.add(piece.bytes)
    return problems


def unused_objects(place: SnapshotPlace, model: str, kept: list[Manifest]) -> Iterator[str]:
    """The objects of a model that none of these names.

    Raises:
        StorageFailed: they cannot be listed.
    """
    used = {piece.object for manifest in kept for piece in manifest.pieces}
    return (each.name for each in place.names(f"{model}/{DATA}") if each.name not in used)
