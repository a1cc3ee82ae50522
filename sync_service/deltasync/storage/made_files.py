"""Which files and folders a service has made, by their names: it removes no other.

models/MODEL/tables/...           files of tables
models/MODEL/views/CONSUMER/...   likewise
                       ... is     HASH/shared, HASH/TABLE-HASH.KIND or HASH/norms/TABLE-HASH.KIND
"""

import contextlib
import re
from collections.abc import Container, Iterator, Set
from pathlib import Path

from deltasync.core.names import NAME_PATTERN

_FOLDER_NAME = "[0-9a-f]{32}"
_ARRAY = r"[^/]*-[0-9a-f]{16}\.(?:[0-9a-f]{16}\.)?(?:rows|stamps|tags|digests|squares|since)"
# Of releases under way; a file system may not have files without a name.
_UNDER_WAY = "tmp[a-z0-9_]{8}"
_TABLE_FILE = f"(?:{_FOLDER_NAME}/)?(?:norms/)?(?:shared|{_ARRAY})|{_UNDER_WAY}"  # Also as named inside of a HASH.
_TABLE_FOLDER = f"(?:{_FOLDER_NAME}/)?norms|{_FOLDER_NAME}"
_FILE_OF_TABLES, _FOLDER_OF_TABLES = re.compile(_TABLE_FILE), re.compile(_TABLE_FOLDER)
_PLACE = f"{NAME_PATTERN}/(?:tables|views/{NAME_PATTERN})"
_FILE = re.compile(f"{_PLACE}/(?:{_TABLE_FILE})|{NAME_PATTERN}/{_UNDER_WAY}")
_FOLDER = re.compile(f"{NAME_PATTERN}(?:/views)?|{_PLACE}(?:/(?:{_TABLE_FOLDER}))?")
# What file systems make in their first folder.
_OF_THE_SYSTEM = frozenset({"lost+found"})
_IN_DATA_DIRECTORY = frozenset({"lock", "log", "models", "kernels", "endpoints.json", "endpoints.new"})
_IN_LOG = frozenset({"data.mdb", "lock.mdb"})


def entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing of one that is not there, or cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def has_models(models: Path) -> bool:
    """Whether a folder of models has any."""
    return any(each.is_dir() and _FOLDER.fullmatch(each.name) for each in entries(models))


def remove_made(path: Path, models: Path) -> None:
    """Remove a file or a folder below the folder of models, as far as a service has made what is in it.

    Other files stay, and the folders they are in.
    """
    for each in (*_below(path), path):
        if _made(each, models, _FILE, _FOLDER):
            _remove(each)


def remove_made_for_tables(folder: Path, used: Container[str] = frozenset()) -> None:
    """Remove what a service has made in a folder of tables, but for the files of these paths that are used."""
    for each in _below(folder):
        if str(each) not in used and _made(each, folder, _FILE_OF_TABLES, _FOLDER_OF_TABLES):
            _remove(each)


def remove_folder_of_tables(folder: Path) -> None:
    """Remove the folder of tables that were made together, if it is one."""
    if folder.is_dir() and _FOLDER_OF_TABLES.fullmatch(folder.name):
        remove_made_for_tables(folder)
        _remove(folder)


def unused(models: Path, used: Set[Path], spared: Set[Path] = frozenset()) -> list[Path]:
    """What a service has made and nobody uses; of folders only the outermost.

    Args:
        models: the folder of all models.
        used: files and folders that are used; what else is in such a folder may be not.
        spared: folders that are not looked into; perhaps that of all models.
    """
    inside = used | {parent for path in used for parent in path.parents}

    def look(folder: Path) -> Iterator[Path]:
        for path in entries(folder):
            if path in spared or not _made(path, models, _FILE, _FOLDER):
                continue
            if _is_folder(path) and (path in inside or _foreign_below(path, models)):
                yield from look(path)
            elif path not in used:
                yield path

    return [] if models in spared else list(look(models))


def foreign(data_dir: Path) -> list[Path]:
    """What is in a data directory that no service has made; of folders only the outermost."""
    found = [each for each in entries(data_dir) if each.name not in _IN_DATA_DIRECTORY]
    found += [each for each in entries(data_dir / "log") if each.name not in _IN_LOG]
    return [each for each in found if each.name not in _OF_THE_SYSTEM] + foreign_to_models(data_dir / "models")


def foreign_to_models(models: Path) -> list[Path]:
    """The same of its folder of models."""
    return list(_foreign_below(models, models))


def _foreign_below(folder: Path, models: Path) -> list[Path]:
    found = list[Path]()
    for path in entries(folder):
        if not _made(path, models, _FILE, _FOLDER):
            found += [path] if path.name not in _OF_THE_SYSTEM else []
        elif _is_folder(path):
            found += _foreign_below(path, models)
    return found


def _made(path: Path, parent: Path, file: re.Pattern[str], folder: re.Pattern[str]) -> bool:
    pattern = folder if path.is_dir() else file
    return bool(pattern.fullmatch(path.relative_to(parent).as_posix()))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _below(folder: Path) -> Iterator[Path]:
    """All that is below a folder, what is in a folder before it."""
    for path in entries(folder) if _is_folder(folder) else ():
        yield from _below(path)
        yield path


def _remove(path: Path) -> None:
    """Remove a file, or a folder that has nothing; what cannot be removed stays, perhaps until the next start."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()
