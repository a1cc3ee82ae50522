"""The C header and `layout.py` agree. `integration/client/test_shared_c.py` compiles the header."""

import re
from inspect import getsource
from pathlib import Path

import pytest

from deltasync.client.shared import layout
from deltasync.kernels import keys as key_kernels

HEADER = (Path(layout.__file__).parent / "deltasync_shared.h").read_text()
TYPES = {"header": layout.HEADER, "side": layout.SIDE, "table": layout.TABLE, "entry": layout.READER}


def defined(name: str) -> str:
    found = re.search(rf"^#define DELTASYNC_{name} (.+)$", HEADER, re.MULTILINE)
    assert found, name
    return found[1].strip('"')


def test_constants() -> None:
    assert defined("MAGIC").encode() == layout.MAGIC
    assert int(defined("VERSION")) == layout.VERSION
    assert int(defined("MOST_TABLES")) == layout.MOST_TABLES
    assert int(defined("MOST_READERS")) == layout.MOST_READERS


@pytest.mark.parametrize("name", TYPES)
def test_asserted_sizes_and_offsets(name: str) -> None:
    assert re.findall(rf"DELTASYNC__SIZE\({name}, (\d+)\)", HEADER) == [str(TYPES[name].itemsize)]
    asserted = re.findall(rf"DELTASYNC__AT\({name}, (?:version\.)?(\w+), (\d+)\)", HEADER)
    fields = TYPES[name].fields
    assert fields
    assert len(asserted) >= 2
    assert {field: fields[field][1] for field, _ in asserted} == {field: int(at) for field, at in asserted}


def test_raw_ids_have_the_same_hash() -> None:
    constants = [set(re.findall(r"0x([0-9A-F]{16})", text)) for text in (HEADER, getsource(key_kernels))]
    assert constants[0] == constants[1]
    assert len(constants[0]) == 4


def test_it_is_short() -> None:
    assert len(HEADER.splitlines()) < 430
