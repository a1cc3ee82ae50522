"""Checks the formats of all files of checkpoints before anything is written."""

import contextlib

from deltasync.checkpoints.chunks import CheckpointDamaged, check_first_chunk
from deltasync.checkpoints.file_storage import Place, PlaceFailed
from deltasync.checkpoints.kept_version import KEPT
from deltasync.checkpoints.manifest import DATA, MANIFESTS, check_first_line, id_of

_CHECKS = (MANIFESTS, check_first_line), (KEPT, check_first_line), (DATA, check_first_chunk)


def check_formats(place: Place) -> None:
    """Check that this version can read the checkpoints and kept versions in a place, whatever their model.

    Recovery reports files that are damaged or cannot be read.
    """
    with contextlib.suppress(PlaceFailed):
        for model in place.names(""):
            for folder, check in _CHECKS:
                for each in place.names(f"{model.name}/{folder}"):
                    if id_of(each.name):
                        with contextlib.suppress(CheckpointDamaged, PlaceFailed), place.open(each.name) as file:
                            check(each.name, file, each.bytes)
