"""Errors of files, and who may read what is made."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deltasync.storage.volume import refused


@contextmanager
def writing(what: str, path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turns what the system refuses inside into an error that says so: that of `refused`.

    A file that is missing has not been refused.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused(what, path, error, needed_bytes) from error


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Give what this process makes meanwhile to its own user alone, whatever its umask is.

    The umask belongs to the whole process: this is for commands, which are alone in theirs. Also a decorator.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
