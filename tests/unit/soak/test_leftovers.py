import asyncio
from pathlib import Path

from tests.soak.leftovers import directory_bytes, leftovers

from deltasync.core.tables import TableSpec
from deltasync.feeds.model import Model
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions


async def _make(data_dir: Path) -> None:
    log = LmdbStore(LogOptions(directory=data_dir / "log"))
    model = Model("m", log, data_dir / "models" / "m")
    await model.add_tables([TableSpec("users", 10, 2)])
    await model.close()
    log.close()


def test_files_of_tables_belong_there_and_others_do_not(tmp_path: Path) -> None:
    asyncio.run(_make(tmp_path))
    (tmp_path / "lock").touch()
    (tmp_path / "endpoints.json").write_text("{}")
    assert leftovers(tmp_path) == []
    lost = tmp_path / "models" / "m" / "0123456789abcdef" / "rows"
    lost.parent.mkdir()
    lost.write_bytes(bytes(10))
    assert leftovers(tmp_path) == ["models/m/0123456789abcdef/rows"]
    assert directory_bytes(tmp_path) >= 4096
