"""A view that comes back is, bit by bit, the view that was there: from any checkpoint and the log after it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import before_turns, bits_of, small_blocks

from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch
from deltasync.core.table_form import Mode
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.views.view import View

USER = TableSpec("user", 9, 4)
ITEM = TableSpec("item", 7, 12, np.dtype("<f2"))
MAP = TableSpec("user.raw_ids", 9, 1, np.dtype("<i8"), TableKind.ID_MAP, "user")
MEAN = TableSpec("norm.mean", 1, 2, np.dtype("<f8"), TableKind.BUFFER)
NAMES = [each.name for each in (USER, ITEM, MAP, MEAN)]

Step = tuple[str, Any]


class Play:
    """A model and views of it, which must be the same after each restart."""

    def __init__(self, local: LocalModel) -> None:
        self.local, self.seed = local, 0
        self.policies: dict[str, Policy] = {}

    async def cut(self, parts: Mapping[str, set[int]]) -> None:
        """Rows get new values, or those that they had before."""
        self.seed += 1
        batches = []
        for table in self.local.model.tables:
            spec, ids = (
                table.spec,
                np.array(sorted({row % table.spec.rows for row in parts.get(table.spec.name, ())})),
            )
            if len(ids):
                values = np.random.default_rng(self.seed % 2).integers(-2, 3, (spec.rows, spec.dim))[ids]
                batches.append(RowBatch(Shard.whole(spec), ids, values.astype(spec.dtype)))
        await self.local.cut_batches(batches)

    async def delete(self, rows: set[int]) -> None:
        if spec := self.spec("user"):
            ids = np.array(sorted({row % spec.rows for row in rows}))
            await self.local.cut_batches([RowBatch.deletes(Shard.whole(spec), ids)])

    async def full(self, rows: set[int]) -> None:
        """A full cut of one table by another run: rows that it does not name are gone."""
        if spec := self.spec("item"):
            ids = np.array(sorted({row % spec.rows for row in rows}))
            values = np.full((len(ids), spec.dim), self.seed, spec.dtype)
            await self.local.cut_batches([RowBatch(Shard.whole(spec), ids, values)], ["item"], resync=True)

    async def grow(self, more: int) -> None:
        wanted = [replace(table.spec, rows=table.spec.rows + more) for table in self.local.model.tables]
        await self.local.model.tables.add([each for each in wanted if each.name != MEAN.name], later_run=True)

    async def remove(self, name: str) -> None:
        if self.spec(name):
            await self.local.model.tables.remove(name)

    async def add(self, again: TableSpec) -> None:
        if not self.spec(again.name):
            await self.local.add(again)

    async def release(self, wish: tuple[str, Policy | None, int, int]) -> None:
        """Make a release; a cut comes between two of its blocks."""
        name, policy, overdue, cut_before = wish
        policy = self.policies[name] = policy or self.policies.get(name, Policy(top_k=1, max_age_seconds=60))
        overdue = overdue if policy.max_age_seconds else 0
        view = self.local.view(name)

        async def meanwhile(turn: int) -> None:
            if turn == cut_before + 1 > 1:
                await self.cut({each: {*range(cut_before, 13, 3)} for each in NAMES})

        with before_turns(self.local, meanwhile):
            await view.prepare(policy, overdue)
            await view.make_release(policy, overdue)
        await self.equals_its_version(view, policy)

    async def equals_its_version(self, view: View, policy: Policy) -> None:
        """All that a policy without limits takes is as in the model at the version that the release names."""
        if policy.top_k is None and policy.max_bytes is None and view.state.head:
            assert view.state.compared_version == self.local.model.position.number
            for table in view.state.tables:
                wanted = table.form.encode(table.source.rows)
                assert table.held.rows.tobytes() == wanted.tobytes()

    async def checkpoint(self, _: None) -> None:
        await self.local.checkpoint()

    async def restart(self, lost: int) -> None:
        """Come back, perhaps without the newest checkpoint."""
        before = {name: await bits_of(view) for name, view in self.local.views.items()}
        await self.local.close()
        manifests = sorted((self.local.directory / "checkpoints").rglob("*.json"))
        for each in manifests[len(manifests) - lost :] if len(manifests) > 1 else ():
            each.unlink()
        self.local = await LocalModel.opened(self.local.directory, options=small_blocks(100))
        assert self.local.lost == {}
        for name, bits in before.items():
            assert await bits_of(self.local.view(name)) == bits, name

    def spec(self, name: str) -> TableSpec | None:
        return next((table.spec for table in self.local.model.tables if table.spec.name == name), None)


POLICIES = st.builds(
    Policy,
    tables=st.sampled_from([("*",), ("user",), ("item", "norm*")]),
    mode=st.sampled_from([Mode.EMBEDDINGS, Mode.EMBEDDINGS, Mode.IDS]),
    top_k=st.sampled_from([None, 1, 2, 0.3]),
    max_age_seconds=st.sampled_from([None, 60]),
    max_bytes=st.sampled_from([None, None, 200]),
    value_type=st.sampled_from([ValueType.FP32, ValueType.FP16, ValueType.INT8, ValueType.INT8_TBE]),
)
SOME = st.sets(st.integers(0, 12), min_size=1, max_size=5)
CUT = st.dictionaries(st.sampled_from(NAMES), SOME, max_size=4)
# Of the releases that are made, most follow a cut, and a policy that leaves rows for later.
RELEASES = st.tuples(
    st.tuples(st.just("cut"), CUT),
    st.tuples(
        st.just("release"),
        st.tuples(st.sampled_from("aaab"), st.none(), st.integers(0, 4), st.sampled_from([0, 0, 1, 2, 3])),
    ),
)
OTHERS = st.one_of(
    st.tuples(st.just("cut"), CUT),
    st.tuples(
        st.just("release"), st.tuples(st.sampled_from("ab"), st.none() | POLICIES, st.integers(0, 4), st.just(0))
    ),
    st.tuples(st.just("delete"), SOME),
    st.tuples(st.just("full"), SOME),
    st.tuples(st.just("grow"), st.integers(1, 4)),
    st.tuples(st.just("remove"), st.sampled_from(["user", "item"])),
    st.tuples(st.just("add"), st.sampled_from([USER, ITEM, replace(ITEM, dim=4)])),
    st.tuples(st.just("checkpoint"), st.none()),
    st.tuples(st.just("restart"), st.integers(0, 1)),
)
STEPS = st.lists(RELEASES | RELEASES | st.tuples(OTHERS), min_size=5, max_size=15)


@settings(suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 1))
def test_a_view_that_comes_back_is_the_same(steps: list[tuple[Step, ...]], lost: int) -> None:
    async def main(folder: Path) -> None:
        play = Play(LocalModel(folder, options=small_blocks(100)))
        await play.local.add(USER, ITEM, MAP, MEAN)
        everything = {name: set(range(13)) for name in NAMES}
        try:
            for name, argument in [
                ("cut", everything),
                *chain(*steps),
                ("restart", lost),
                ("checkpoint", None),
                ("restart", 0),
            ]:
                await getattr(play, name)(argument)
        finally:
            await play.local.close()

    with fast_folder() as folder:
        asyncio.run(main(Path(folder)))
