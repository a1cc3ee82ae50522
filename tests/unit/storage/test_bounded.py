"""However many versions there are, the data directory stays as large as what is kept of them."""

from pathlib import Path

import pytest
from tests.support.folders import fast_folder
from tests.support.versions import publish


def test_a_data_directory_does_not_grow_with_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltasync.storage.model_store.KEPT_SEALS", 250)
    with fast_folder() as folder:
        sizes = list(publish(Path(folder), 4_000, looks=8))
    assert [each.version for each in sizes] == list(range(500, 4_001, 500))
    assert len({each.files for each in sizes}) == 1
    assert max(each.bytes for each in sizes[2:]) <= 1.1 * sizes[1].bytes
    assert sizes[-1].log_bytes < 2 << 20
