"""The functions of `deltasync_shared.h`, compiled and called from Python."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltasync.client.shared import layout
from deltasync.core.rows import Ids

FOLDER = Path(layout.__file__).parent
EXAMPLE = Path(__file__).parents[2] / "sync_service/examples/predictor.cpp"
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
OK, NO_MIRROR, FOREIGN, LAYOUT, SYSTEM, NO_RELEASE, NO_TABLE, ROW_BYTES, NEGATIVE, BUSY, TORN = range(11)
READERS, PINNED, REMOVED, OWNER, LINK = range(11, 16)


def compiled(made: Path, source: Path, *options: str, language: str = "c++", standard: str = "c++17") -> Path:
    """Compile a program or library; skips the test without a compiler."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("needs a C++ compiler, g++")
    command = [compiler, "-x", language, f"-std={standard}", "-O2", *WARNINGS, "-I", str(FOLDER), str(source)]
    done = subprocess.run([*command, *options, "-o", str(made)], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return made


class Version(ctypes.Structure):
    """`deltasync_version`."""

    _fields_ = (
        ("version", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("step_end_unix_ns", ctypes.c_int64),
        ("event_time_unix_ns", ctypes.c_int64),
    )


class Table(ctypes.Structure):
    """`deltasync_table`."""

    _fields_ = (
        ("dtype", ctypes.c_char * 9),
        *((name, ctypes.c_uint32) for name in ("dim", "row_bytes", "value_type", "table_dim")),
        *((name, ctypes.c_uint64) for name in ("rows", "slot_count")),
        *((name, ctypes.c_void_p) for name in ("values", "there", "slots")),
    )


def library(folder: Path) -> Any:
    """The functions of the header."""
    source = folder / "library.c"
    source.write_text('#define DELTASYNC_API\n#include "deltasync_shared.h"\n')
    made = compiled(folder / "library.so", source, "-shared", "-fPIC", language="c", standard="c11")
    functions = ctypes.CDLL(str(made), use_errno=True)
    functions.deltasync_text.restype = ctypes.c_char_p
    functions.deltasync_age_seconds.restype = ctypes.c_double
    functions.deltasync_row_of.restype = ctypes.c_int64
    return functions


class CReader:
    """A reader in C of a mirror's folder."""

    def __init__(self, functions: Any, path: Path | str, owner: int | None = None) -> None:
        self.functions, self._reader = functions, ctypes.c_void_p()
        arguments = ctypes.byref(self._reader), str(path).encode()
        if owner is None:
            self.attached = functions.deltasync_attach(*arguments)
        else:
            self.attached = functions.deltasync_attach_to(*arguments, ctypes.c_uint32(owner))

    def newest(self) -> tuple[int, Version]:
        version = Version()
        return self.functions.deltasync_newest(self._reader, ctypes.byref(version)), version

    def find(self, name: str) -> tuple[int, Table]:
        table = Table()
        return self.functions.deltasync_find(self._reader, name.encode(), ctypes.byref(table)), table

    def rows(self, name: str, ids: Ids, row_bytes: int) -> tuple[int, NDArray[np.uint8], int]:
        """Rows by number: the code, their bytes and the version."""
        rows, version = np.full((len(ids), row_bytes), 0xEE, np.uint8), Version()
        code = self.functions.deltasync_lookup(
            self._reader,
            name.encode(),
            ids.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(ids)),
            rows.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(row_bytes),
            ctypes.byref(version),
        )
        return code, rows, version.version

    def keys(self, name: str, keys: Ids, row_bytes: int) -> tuple[int, NDArray[np.uint8], NDArray[np.bool_], int]:
        """Rows by raw id: the code, their bytes, which exist, and the version."""
        rows, version = np.full((len(keys), row_bytes), 0xEE, np.uint8), Version()
        exist = np.full(len(keys), 2, np.uint8)
        code = self.functions.deltasync_lookup_keys(
            self._reader,
            name.encode(),
            keys.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(keys)),
            rows.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(row_bytes),
            exist.ctypes.data_as(ctypes.c_void_p),
            ctypes.byref(version),
        )
        assert code or set(exist.tolist()) <= {0, 1}
        return code, rows, exist.astype(np.bool_), version.version

    def pin(self) -> int:
        return int(self.functions.deltasync_pin(self._reader))

    def release(self) -> int:
        return int(self.functions.deltasync_release(self._reader))

    def row_of(self, table: Table, key: int) -> int:
        return int(self.functions.deltasync_row_of(ctypes.byref(table), ctypes.c_int64(key)))

    def ready(self) -> tuple[bool, str]:
        reason = ctypes.create_string_buffer(1024)
        yes = self.functions.deltasync_is_ready(self._reader, reason, ctypes.c_size_t(len(reason)))
        return bool(yes), reason.value.decode()

    def is_alive(self) -> bool:
        return bool(self.functions.deltasync_is_alive(self._reader))

    def is_removed(self) -> bool:
        return bool(self.functions.deltasync_is_removed(self._reader))

    def age(self, version: Version) -> float:
        return float(self.functions.deltasync_age_seconds(ctypes.byref(version)))

    def detach(self) -> None:
        self.functions.deltasync_detach(self._reader)
