"""What a soak leaves: files that nothing needs, and tracebacks in all logs."""

import re
from pathlib import Path

from tests.soak.fleet import CLICKS

from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.kept_version import KEPT
from deltasync.checkpoints.manifest import DATA, MANIFESTS, id_of
from deltasync.checkpoints.store import CheckpointStore, models_of
from deltasync.log.data_directory import CHECKPOINTS

# Names that a service or a file system creates in a data directory.
_TOP = {"lock", "log", CHECKPOINTS, "kernels", "endpoints.json", "endpoints.new", "lost+found"}
_LOG = {"data.mdb", "lock.mdb"}
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.*)", re.MULTILINE)


def tracebacks(folder: Path) -> list[str]:
    """The errors that were logged with a traceback: file, and the traceback's last line.

    Those of TorchRec's ranks are left out: one that loses another has no other way to end.
    """
    files = (file for file in sorted(folder.glob("*.log")) if not file.name.startswith(f"{CLICKS}-rank"))
    return [
        f"{file.name}: {last}" for file in files for last in _TRACEBACK.findall(file.read_text(errors="replace"))
    ]


def leftovers(data_dir: Path) -> list[str]:
    """Files, relative to the data directory, that no service has made, or that no checkpoint names although two
    newer ones are complete.
    """
    found = _unknown_files(data_dir)
    place = Place(str(data_dir / CHECKPOINTS))
    for model in models_of(place):
        manifests = CheckpointStore(model, place).manifests().manifests
        named = {file.name for each in manifests for file in each.files}
        before = manifests[1].id if len(manifests) > 1 else ""
        files = (each.name for each in place.names(f"{model}/{DATA}"))
        found += [f"{place.url}/{name}" for name in files if name not in named and id_of(name) < before]
    return sorted(str(Path(each).relative_to(data_dir)) for each in found)


def _unknown_files(data_dir: Path) -> list[str]:
    folders = [(data_dir, _TOP), (data_dir / "log", _LOG)]
    paths = [path for folder, names in folders for path in folder.iterdir() if path.name not in names]
    for model in (data_dir / CHECKPOINTS).iterdir():
        paths += [path for path in model.iterdir() if path.name not in (MANIFESTS, DATA, KEPT)]
        paths += [path for path in model.glob("*/*") if not id_of(path.name)]
    return [str(path) for path in paths]


def directory_bytes(folder: Path) -> int:
    """Bytes that the files in a folder take; some may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
