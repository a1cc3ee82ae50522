"""A click model with quantised tables, as TorchRec quantises them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingBagCollection

from deltasync.core.value_types import ValueType
from deltasync.trainer.clicks.model import ClickModel

DTYPES = {"int8": torch.qint8, "int4": torch.quint4x2}
"""What TorchRec calls a predictor's tables, by what the commands call them."""


def value_type_of(tables: str) -> ValueType:
    """The value type that a consumer needs whose predictors have such tables."""
    return ValueType(f"{tables}-tbe")


def quantised(model: ClickModel, tables: str) -> ClickModel:
    """The same model, changed in place, with its tables quantised to `int8` or `int4`."""
    found: ClickModel = quantize_embeddings(model, dtype=DTYPES[tables], inplace=True)
    return found


def tbe_rows(model: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of each quantised table's bytes, uint8 [rows, width], by the table's short name.

    Scale and bias come first, then the codes; what only pads a row is left out.
    """
    collections = [each for each in model.modules() if isinstance(each, EmbeddingBagCollection)]
    return dict(item for each in collections for tbe in each._emb_modules for item in _rows(tbe))


def _rows(tbe: Any) -> list[tuple[str, NDArray[Any]]]:
    weights = tbe.split_embedding_weights_with_scale_bias(0)
    return [
        (name, np.ascontiguousarray(rows.numpy()[:, : 4 + dim * kind.bit_rate() // 8]))
        for (name, _, dim, kind, _), (rows, *_) in zip(tbe.embedding_specs, weights, strict=True)
    ]
