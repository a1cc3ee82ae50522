"""The trainer's model, gathered from its ranks into one that is not sharded: what replicas should be."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from deltasync.trainer.clicks.batch import ClickBatch, click_batch
from deltasync.trainer.clicks.features import RAW_IDS, Featurizer
from deltasync.trainer.clicks.model import ClickModel
from deltasync.trainer.clicks.model_options import ModelOptions
from deltasync.trainer.clicks.model_state import IdMap
from deltasync.trainer.clicks.stream import Pace
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.demo.scorer import outputs

Arrays = Mapping[str, NDArray[np.generic]]


class GatheredIds(nn.Module):
    """Rows of raw ids, as the ranks together give them in evaluation.

    A rank has the raw ids of one range, and the ids in it that have no row take its last one. Written anew, not
    with what replicas use: it is what they are compared with.
    """

    def __init__(self, bags: EmbeddingBagCollection, shards: Mapping[str, list[IdMap]]) -> None:
        """Take over the tables `bags`; `shards` are the maps of all ranks in turn, by the table's short name."""
        super().__init__()
        self._bags, self._shards = bags, shards

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, None]:
        """The same as managed collision returns."""
        rows = {}
        for table in self._bags.embedding_bag_configs():
            for name in table.feature_names:
                ids = features[name].values().numpy()
                values = torch.from_numpy(rows_of(self._shards[table.name], ids))
                rows[name] = JaggedTensor(values, lengths=features[name].lengths())
        return self._bags(KeyedJaggedTensor.from_jt_dict(rows)), None


def rows_of(shards: list[IdMap], raw_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The global rows of `raw_ids`, [n], by the maps of all ranks in turn."""
    row_of = {
        raw: shard.first_row + row
        for shard in shards
        for row, raw in enumerate((shard.ids - 1).tolist())
        if raw >= 0
    }
    last_rows = [shard.first_row + len(shard.ids) - 1 for shard in shards]
    share = -(-RAW_IDS // len(shards))
    return np.array([row_of.get(raw, last_rows[raw // share]) for raw in raw_ids.tolist()], np.int64)


def gathered_model(
    options: ModelOptions, tables: Arrays, shards: Mapping[str, list[IdMap]], buffers: Arrays
) -> ClickModel:
    """A model in evaluation mode that holds these tables, maps and buffers.

    Args:
        options: its sizes.
        tables: whole, by FQN; parameters outside of tables too.
        shards: maps of all ranks in turn, by the table's short name.
        buffers: by FQN.
    """
    model = ClickModel(options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = tables[name] if name in tables else tables[name.removesuffix(".weight")]
            parameter.copy_(torch.from_numpy(rows).view_as(parameter))
        for name, values in buffers.items():
            model.get_buffer(name).copy_(torch.from_numpy(values))
    if model.managed is not None:
        model.managed = GatheredIds(model.managed._embedding_module, shards)
    return model


def last_outputs(model: ClickModel, stream: StreamOptions) -> dict[str, NDArray[np.generic]]:
    """Index and logit of the events of a stream's last batch, by this model."""
    with _one_thread(), _quiet():
        batch = _last_batch(stream)
        return {"index": batch.index.numpy(), "logit": outputs(model, batch).numpy()}


def _last_batch(stream: StreamOptions) -> ClickBatch:
    featurizer, past = Featurizer(stream.features), Pace(start_unix=0, events_per_second=stream.events_per_second)
    for features in map(featurizer.features, stream.batches(past)):
        last = features
    return click_batch(last)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning for authors of TorchRec that the first lookup logs."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


@contextmanager
def _one_thread() -> Iterator[None]:
    """As replicas compute: with more threads, sums may be added in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
