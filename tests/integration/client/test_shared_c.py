"""Readers in C and C++ of a mirror's memory read what the reader in Python does."""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import shared_c, shared_memory
from tests.support.examples import examples
from tests.support.forked_child import answers_in_a_fork
from tests.support.keyed_model import CHANGES, ITEM, ROWS, TABLES, USER, Change, KeyedModel
from tests.support.programs import killed
from tests.support.shared_c import CReader, compiled
from tests.support.shared_memory import attached, header, move, pins, release_of
from tests.support.waiting import wait_for

from deltasync.base.decision import Decision
from deltasync.client import Position, Release, RowBatch, Shard, TableSpec
from deltasync.client.shared import layout
from deltasync.client.shared.reader import SharedReader
from deltasync.client.shared.target import SharedTarget
from deltasync.client.targets.keyed_table import KeyIndex
from deltasync.core.tables import FREE_ID, TableKind

WHOLE = st.frozensets(st.sampled_from([table.name for table in TABLES]))
KEYS = np.array([*range(-3, ROWS + 3), -(2**63), 2**63 - 2, 2**63 - 1])
IDS = np.arange(ROWS + 3)[::-1].copy()
PAIR = [TableSpec("user", 50, 16), TableSpec("item", 40, 16)]
PAIR.append(TableSpec("user.raw_ids", 50, 1, np.dtype("<i8"), TableKind.ID_MAP, "user"))
HOLDER = """
#include "deltasync_shared.h"
int main(int, char **arguments) {
    deltasync_reader *reader;
    deltasync_version version;
    if (deltasync_attach(&reader, arguments[1]) || deltasync_pin(reader)) return 1;
    if (deltasync_newest(reader, &version)) return 2;
    printf("%llu\\n", static_cast<unsigned long long>(version.version));
    fflush(stdout);
    getchar();
    int looked = deltasync_newest(reader, &version), released = deltasync_release(reader);
    printf("%d %d\\n", looked, released);
    deltasync_detach(reader);
}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled programs."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def functions(made: Path) -> Any:
    return shared_c.library(made)


@pytest.fixture(scope="module")
def predictor(made: Path) -> Path:
    return compiled(made / "predictor", shared_c.EXAMPLE, "-pthread")


@pytest.fixture(scope="module")
def holder(made: Path) -> Path:
    """A program that pins a version, prints it, and releases it after a line of input."""
    (made / "holder.cpp").write_text(HOLDER)
    return compiled(made / "holder", made / "holder.cpp")


def pair_of(version: int) -> Release:
    """A release of two tables, one with raw ids, whose values differ with each version."""
    generator = np.random.default_rng(version)
    values = [
        generator.integers(-500, 500, (PAIR[0].rows, 16)).astype(np.float32),
        generator.integers(-500, 500, (PAIR[1].rows, 16)).astype(np.float32),
        generator.permutation(1000)[:50, None] ^ FREE_ID,
    ]
    rows = [
        RowBatch(Shard.whole(table), np.arange(table.rows), rows) for table, rows in zip(PAIR, values, strict=True)
    ]
    release = Release(Position("h", version, version), version, version, version == 1, PAIR, rows)
    return replace(release, version=version, model="clicks")


@contextmanager
def mirror(folder: Path, **options: Any) -> Iterator[SharedTarget]:
    target = shared_memory.mirror(folder, **options)
    try:
        yield target
    finally:
        target.close()


def started(program: Path, *arguments: object) -> "subprocess.Popen[str]":
    command = [str(program), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_c_structs_have_the_documented_layout(made: Path) -> None:
    types = {
        "header": layout.HEADER,
        "side": layout.SIDE,
        "table": layout.TABLE,
        "entry": layout.READER,
    }
    expected, lines = list[str](), list[str]()
    for name, dtype in types.items():
        assert dtype.fields
        for field, (_, offset, *_) in dtype.fields.items():
            nested = name == "side" and field in dict(shared_c.Version._fields_)
            path = f"deltasync__{name}, {'version.' if nested else ''}{field}"
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({path}));')
            expected.append(f"{name}.{field} {offset}")
    lines.append('printf("%zu\\n", DELTASYNC__CONTROL_BYTES);')
    lines = ['#include "deltasync_shared.h"', "int main() {", *lines, "}"]
    (made / "offsets.cpp").write_text("\n".join(lines))
    program = compiled(made / "offsets", made / "offsets.cpp")
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == [*expected, str(layout.CONTROL_BYTES)]


def check_equal(c: CReader, python: SharedReader, tables: list[TableSpec]) -> None:
    for table in tables:
        row_bytes = table.dim * table.dtype.itemsize
        values, version = python.lookup(table.name, IDS)
        assert c.rows(table.name, IDS, row_bytes)[0::2] == (shared_c.OK, version)
        assert c.rows(table.name, IDS, row_bytes)[1].tobytes() == values.tobytes()
        values, exist, version = python.lookup_keys(table.name, KEYS)
        code, rows, there, at = c.keys(table.name, KEYS, row_bytes)
        assert (code, at, there.tolist()) == (shared_c.OK, version, exist.tolist())
        assert rows.tobytes() == values.tobytes()
        code, found = c.find(table.name)
        assert (code, found.dtype, found.dim, found.rows) == (0, table.dtype.str.encode(), table.dim, table.rows)
    told, now = c.newest()[1], python.version()
    assert (told.version, told.step, told.step_end_unix_ns) == (
        now.version,
        now.step,
        now.step_end_unix_ns,
    )
    assert (told.event_time_unix_ns or None) == now.event_time_unix_ns
    assert now.age_seconds is not None
    assert c.age(told) == pytest.approx(now.age_seconds, abs=60)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples() // 4)
@given(steps=st.lists(st.tuples(CHANGES, st.booleans(), WHOLE, st.booleans()), min_size=1, max_size=5))
def test_c_reads_the_same_rows_and_keys_as_python(
    functions: Any, steps: list[tuple[Change, bool, frozenset[str], bool]]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        model = KeyedModel()
        target = shared_memory.mirror(Path(name))
        python, c = attached(Path(name)), CReader(functions, f"{name}/deltasync-m")
        for change, resync, whole, restart in steps:
            held = model.version
            model.change(change)
            target.apply(model.release(held, resync=resync or not held, whole=whole))
            check_equal(c, python, TABLES)
            assert c.pin() == shared_c.OK
            check_equal(c, python, TABLES)
            code, table = c.find(USER.name)
            assert code == shared_c.OK
            exist = python.lookup_keys(USER.name, KEYS)[1]
            assert [c.row_of(table, key) >= 0 for key in KEYS.tolist()] == exist.tolist()
            assert c.release() == shared_c.OK
            if restart:
                target.close()
                target = shared_memory.mirror(Path(name))
        target.close()
        c.detach()


def test_c_finds_raw_ids_among_many_erased_ones(functions: Any) -> None:
    c, generator = CReader(functions, "none"), np.random.default_rng(0)
    index = KeyIndex()
    keys = generator.integers(-(2**63), 2**63 - 1, 5000)
    index.put(keys, np.arange(5000))
    index.remove(keys[::2])
    table = shared_c.Table(rows=5000, slot_count=len(index.slots), slots=index.array.ctypes.data)
    assert [c.row_of(table, key) for key in keys.tolist()] == index.find(keys).tolist()
    table.rows = 100
    assert {c.row_of(table, key) for key in keys.tolist()} == {-1, *range(1, 100, 2)}


def test_tables_that_grow_come_and_go_are_found(functions: Any, folder: Path) -> None:
    with mirror(folder) as target:
        c, python = CReader(functions, layout.folder_of("m", folder)), attached(folder)
        larger = TableSpec(USER.name, 3 * ROWS, USER.dim)
        for version, table in enumerate((USER, USER, larger, ITEM, ITEM, larger, USER), 1):
            target.apply(release_of(version, table))
            check_equal(c, python, [table])
            other = ITEM if table.name == USER.name else USER
            assert c.rows(other.name, IDS, 8)[0] == shared_c.NO_TABLE
        c.detach()


@pytest.mark.parametrize("lose", [shutil.rmtree, move])
def test_no_reader_reads_another_mirror_that_replaces_its_own(
    functions: Any, folder: Path, lose: Callable[[Path], None]
) -> None:
    path = layout.folder_of("m", folder)
    with mirror(folder) as target:
        target.apply(release_of(1, USER, ITEM))
        c, pinning = CReader(functions, path), CReader(functions, path)
        assert c.rows(USER.name, IDS, 8)[2] == 1
        assert not c.is_removed()
    lose(path)
    with mirror(folder) as target:
        target.apply(release_of(99, USER, ITEM, resync=True))
        assert c.is_removed()
        assert c.rows(ITEM.name, IDS, 8)[0] == c.find(ITEM.name)[0] == shared_c.REMOVED
        pinning.pin()  # It can pin a moved folder, but read no new file there.
        assert pinning.find(ITEM.name)[0] == shared_c.REMOVED
        assert c.rows(USER.name, IDS, 8)[0::2] == (shared_c.OK, 1), "what it has mapped stays"
        again = CReader(functions, path)
        assert again.rows(ITEM.name, IDS, ITEM.dim * ITEM.dtype.itemsize)[0::2] == (shared_c.OK, 99)
        header(folder)["ready"] = 1
        assert again.ready()[0]
        assert not c.ready()[0]


def test_a_folder_of_another_user_needs_the_owner_argument(functions: Any, folder: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a folder away")
    path, nobody = layout.folder_of("m", folder), 65534
    with mirror(folder) as target:
        target.apply(release_of(1))
    os.chown(path, nobody, -1)
    assert CReader(functions, path).attached == CReader(functions, path, 12345).attached == shared_c.OWNER
    c = CReader(functions, path, nobody)
    assert c.newest()[1].version == 1
    c.detach()


def test_links_are_not_followed(functions: Any, folder: Path) -> None:
    path, link = layout.folder_of("m", folder), folder / "deltasync-link"
    with mirror(folder) as target:
        target.apply(release_of(1))
        link.symlink_to(path)
        assert CReader(functions, link).attached == CReader(functions, f"{link}/").attached == shared_c.LINK
        for name in (layout.READERS, *(each.name for each in path.glob("[0-9a-f]"))):
            (path / name).rename(folder / name)
            (path / name).symlink_to(folder / name)
        c = CReader(functions, path)
        assert c.find(USER.name)[0] == c.pin() == shared_c.SYSTEM
        assert ctypes.get_errno() == errno.ELOOP
        c.detach()
        (path / layout.CONTROL).rename(folder / layout.CONTROL)
        (path / layout.CONTROL).symlink_to(folder / layout.CONTROL)
        assert CReader(functions, path).attached == shared_c.SYSTEM


def test_a_forked_process_releases_no_pin_of_its_parent(functions: Any, folder: Path) -> None:
    with mirror(folder) as target:
        target.apply(release_of(1))
        c = CReader(functions, layout.folder_of("m", folder))
        assert c.pin() == shared_c.OK
        assert answers_in_a_fork(lambda: {"code": c.release()}) == {"code": shared_c.PINNED}
        assert pins(folder) == [0]
        assert c.release() == shared_c.OK
        c.detach()


def test_each_error_has_a_code(functions: Any, folder: Path) -> None:
    def attached() -> int:
        return int(CReader(functions, path).attached)

    path = layout.folder_of("m", folder)
    assert attached() == CReader(functions, "no-such-mirror").attached == shared_c.NO_MIRROR
    with mirror(folder) as target:
        c = CReader(functions, path)
        assert (c.newest()[0], c.pin(), c.release()) == (*[shared_c.NO_RELEASE] * 2, shared_c.PINNED)
        target.apply(replace(release_of(1), more=True))
        assert (c.newest()[0], c.pin(), c.find(USER.name)[0]) == (shared_c.NO_RELEASE,) * 3
        target.apply(release_of(1))
        assert c.find("no table")[0] == shared_c.NO_TABLE
        assert c.rows(USER.name, IDS, 4)[0] == c.keys(USER.name, IDS, 12)[0] == shared_c.ROW_BYTES
        assert c.rows(USER.name, np.array([0, -1]), 8)[0] == shared_c.NEGATIVE
        assert [c.pin(), c.pin(), c.release(), c.release()] == [0, shared_c.PINNED, 0, shared_c.PINNED]
        assert not c.find(USER.name)[1].values, "addresses are only valid while a version is pinned"
        for each in path.iterdir():
            if each.name not in (layout.CONTROL, layout.READERS):
                each.unlink()
        assert CReader(functions, path).find(USER.name)[0] == shared_c.SYSTEM
        assert ctypes.get_errno() == errno.ENOENT
    control = path / layout.CONTROL
    content = control.read_bytes()
    for changed, code in (
        (b"DELTASHM\x09", shared_c.LAYOUT),
        (b"ELTASHMD\x02", shared_c.FOREIGN),
    ):
        control.write_bytes(changed + content[len(changed) :])
        assert attached() == code
    for shorter in (b"", content[:100], content[:-1]):
        control.write_bytes(shorter)
        assert attached() == shared_c.FOREIGN
    texts = [functions.deltasync_text(code).decode() for code in range(-1, 17)]
    assert texts[0] == texts[-1] == "unknown code"
    assert len(set(texts)) == 17


def test_a_reader_reports_whether_its_mirror_runs_and_is_ready(functions: Any, folder: Path) -> None:
    with mirror(folder) as target:
        c, python = CReader(functions, layout.folder_of("m", folder)), attached(folder)
        for decision in (Decision(False, "it catches up"), Decision(True, "it has caught up")):
            target.note_readiness(decision)
            assert c.ready() == (python.readiness.yes, python.readiness.reason) == (decision.yes, decision.reason)
        assert c.is_alive()
    assert not c.is_alive()
    assert c.ready() == (False, "its mirror has stopped or hangs, or its folder was moved or removed")
    c.detach()


def test_no_reader_in_c_sees_a_torn_row_during_releases(functions: Any, folder: Path) -> None:
    table = TableSpec("wide", 2000, 64)
    ids, found = np.arange(table.rows), list[str]()

    def look() -> None:
        c = CReader(functions, layout.folder_of("m", folder))
        for turn in range(2000):
            if pin := turn % 3 == 0:
                assert c.pin() == shared_c.OK
            code, rows, version = c.rows(table.name, ids, 256)
            if code or not (rows.view(np.float32) == version).all():
                found.append(f"code {code}, version {version}")
            if pin and (code := c.release()):
                found.append(f"released: {code}")
        c.detach()

    with mirror(folder) as target:
        target.apply(release_of(1, table))
        threads = [threading.Thread(target=look) for _ in range(3)]
        for each in threads:
            each.start()
        version = 1
        while any(each.is_alive() for each in threads):
            version += 1
            target.apply(release_of(version, table))
    assert found == []
    assert version > 3


def score(reader: SharedReader, user: int, item: int) -> tuple[int, int, int, float | None]:
    """The answer that the example should give from the version that is served now."""
    users, user_exists, version = reader.lookup_keys("user", np.array([user]))
    items, item_exists, _ = reader.lookup_keys("item", np.array([item]))
    if not (user_exists[0] and item_exists[0]):
        return user, item, version, None
    # Whole numbers, whose sum is exact in any order.
    return user, item, version, float(users[0] @ items[0])


def parsed(line: str) -> tuple[int, int, int, float | None]:
    user, item, version, found = line.split()
    return int(user), int(item), int(version), None if found == "missing" else float.fromhex(found)


@pytest.mark.nightly  # The example is compiled.
def test_a_predictor_in_cpp_agrees_with_python_during_releases(predictor: Path, folder: Path) -> None:
    asked = [(user, item) for user in range(0, 1000, 37) for item in range(-1, 42, 3)]
    expected, answers = set[tuple[int, int, int, float | None]](), list[str]()
    with mirror(folder) as target, started(predictor, layout.folder_of("m", folder), "user", "item", 4) as process:
        assert process.stdin
        assert process.stdout
        output = process.stdout
        target.apply(pair_of(1))
        python = attached(folder)
        expected.update(score(python, *each) for each in asked)
        reading = threading.Thread(target=lambda: answers.extend(output))
        reading.start()
        version, rounds = 1, 20
        for _ in range(rounds):
            process.stdin.write("".join(f"{user} {item}\n" for user, item in asked))
            process.stdin.flush()
            version += 1
            target.apply(pair_of(version))
            expected.update(score(python, *each) for each in asked)
        process.stdin.close()
        reading.join()
    assert process.returncode == 0
    assert len(answers) == rounds * len(asked)
    found = {parsed(line) for line in answers}
    assert found <= expected
    assert len({version for _, _, version, _ in found}) > 1
    assert {product is None for _, _, _, product in found} == {True, False}


@pytest.mark.nightly  # The example is compiled.
def test_a_predictor_in_cpp_attaches_to_a_recreated_mirror(predictor: Path, folder: Path) -> None:
    path = layout.folder_of("m", folder)
    with mirror(folder) as target:
        target.apply(pair_of(1))
        keys = np.arange(1000)
        user = keys[attached(folder).lookup_keys("user", keys)[1]][0]
        process = started(predictor, path, "user", "item", 1)
    with killed(process):
        questions, answers = process.stdin, process.stdout
        assert questions
        assert answers

        def asked() -> str:
            questions.write(f"{user} 0\n")
            questions.flush()
            return answers.readline()

        assert parsed(asked())[2] == 1
        shutil.rmtree(path)
        assert parsed(asked())[2] == 1, "the version that it has, until there is another mirror"
        with mirror(folder) as target:
            target.apply(replace(pair_of(7), resync=True))
            expected = score(attached(folder), user, 0)
            assert expected[2] == 7
            assert parsed(asked()) == expected


def test_a_reader_in_cpp_that_pins_for_too_long_gets_torn(holder: Path, folder: Path) -> None:
    with mirror(folder, longest_pin_seconds=0.05) as target:
        target.apply(release_of(1))
        with killed(started(holder, layout.folder_of("m", folder))) as process:
            assert process.stdout
            assert process.stdout.readline() == "1\n"
            target.apply(release_of(2))
            target.apply(release_of(3))
            out, _ = process.communicate("\n")
            assert out == f"{shared_c.TORN} {shared_c.TORN}\n"


def test_a_reader_in_cpp_holds_its_version_and_the_mirror_waits(holder: Path, folder: Path) -> None:
    with mirror(folder, longest_pin_seconds=60.0) as target:
        target.apply(release_of(1))
        with killed(started(holder, layout.folder_of("m", folder))) as process:
            assert process.stdout
            assert process.stdout.readline() == "1\n"
            applying = threading.Thread(target=target.apply, args=(release_of(2),))
            applying.start()
            python = attached(folder)
            wait_for(lambda: python.version().version == 2)
            assert applying.is_alive(), "it waits for the reader before it writes the other side"
            out, _ = process.communicate("\n")
            assert out == f"{shared_c.OK} {shared_c.OK}\n"
            applying.join()
