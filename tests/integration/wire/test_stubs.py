"""The committed stubs are those of the .proto files, and every name in these is documented."""

import filecmp
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

PROTOS = Path(__file__).parents[3] / "protos"
FILES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("deltasync/v1/*.proto"))
assert FILES


def protoc(*arguments: str) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *arguments, *FILES]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": str(Path(sys.executable).parent)}
    )
    assert done.returncode == 0, done.stderr


def test_the_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    protoc(
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}",
        f"--mypy_grpc_out=quiet:{tmp_path}",
    )
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")}
    committed = {
        path.relative_to(PROTOS) for path in PROTOS.rglob("*_pb2*.py*") if "__pycache__" not in path.parts
    }
    assert made == committed
    differing = [path for path in made if not filecmp.cmp(tmp_path / path, PROTOS / path, shallow=False)]
    assert not differing, "run `make protos`"


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set"
    protoc("--include_source_info", f"--descriptor_set_out={out}")
    return list(descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file)


def named(file: descriptor_pb2.FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Path (as in source info) and name of every message, field, oneof, enum, value, service and method."""
    for number, message in enumerate(file.message_type):
        assert not message.nested_type, "nested messages are not looked at here"
        assert not message.enum_type, "nested enums are not looked at here"
        yield (4, number), message.name
        yield from (((4, number, 2, index), field.name) for index, field in enumerate(message.field))
        yield from (((4, number, 8, index), oneof.name) for index, oneof in enumerate(message.oneof_decl))
    for number, enum in enumerate(file.enum_type):
        yield (5, number), enum.name
        yield from (((5, number, 2, index), value.name) for index, value in enumerate(enum.value))
    for number, service in enumerate(file.service):
        yield (6, number), service.name
        yield from (((6, number, 2, index), method.name) for index, method in enumerate(service.method))


def test_every_name_has_a_comment_that_begins_so(
    descriptors: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    assert len(descriptors) == len(FILES)
    undocumented, seen = [], 0
    for file in descriptors:
        comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}
        for path, name in named(file):
            seen += 1
            words = re.findall(r"\w+", comments.get(path, ""))
            if words[:1] != [name] or len(words) < 3:
                undocumented.append(f"{file.name}: {name}")
    assert not undocumented
    assert seen > 80


def test_the_wire_knows_every_message_of_the_protos(descriptors: list[descriptor_pb2.FileDescriptorProto]) -> None:
    for file in descriptors:
        module = importlib.import_module(file.name.removesuffix(".proto").replace("/", ".") + "_pb2")
        assert {message.name for message in file.message_type} == set(module.DESCRIPTOR.message_types_by_name)
