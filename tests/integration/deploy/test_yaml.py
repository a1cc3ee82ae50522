from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml


def _repeated(node: yaml.Node | None) -> Iterator[str]:
    """Keys that are there twice, of which YAML would keep the last in silence."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        yield from {key for key in keys if keys.count(key) > 1}
        for _, value in node.value:
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def test_no_key_is_there_twice(deploy: Path) -> None:
    files = [path for path in deploy.rglob("*") if path.suffix in {".yaml", ".yml"}]
    assert len(files) >= 7
    for path in files:
        for document in yaml.compose_all(path.read_text(), yaml.SafeLoader):
            assert not list(_repeated(document)), path


def test_repeated_keys_are_found() -> None:
    assert list(_repeated(yaml.compose("a: [{b: 1, b: 2}]", yaml.SafeLoader))) == ["b"]
    with pytest.raises(yaml.YAMLError):
        yaml.compose("a: [", yaml.SafeLoader)
