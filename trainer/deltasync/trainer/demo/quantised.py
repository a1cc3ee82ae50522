"""A click model with quantised tables, as TorchRec quantises them."""

from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingBagCollection

from deltasync.core.tables import matrix_shape
from deltasync.core.tbe import width
from deltasync.core.value_types import ValueType
from deltasync.trainer.clicks.model import ClickModel

_DTYPES = {ValueType.INT8_TBE: torch.qint8, ValueType.INT4_TBE: torch.quint4x2}

value_type_option = click.option(
    "--value-type",
    type=click.Choice([each.value for each in _DTYPES]),
    default=ValueType.INT8_TBE.value,
    help="That of its consumer: tables are quantised so.",
)


def quantised(model: ClickModel, value_type: ValueType) -> ClickModel:
    """The same model, changed in place, with tables that are quantised as a value type says."""
    found: ClickModel = quantize_embeddings(model, dtype=_DTYPES[value_type], inplace=True)
    return found


def served_rows(model: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of what a model with quantised tables serves from, as rows: its tables, and parameters by FQN."""
    parameters = {name: each.detach().numpy() for name, each in model.named_parameters()}
    return tbe_rows(model) | {name: each.reshape(matrix_shape(each.shape)) for name, each in parameters.items()}


def tbe_rows(model: nn.Module) -> dict[str, NDArray[Any]]:
    """A copy of each quantised table's bytes, uint8 [rows, width], by the table's short name.

    Scale and bias come first, then the codes; what only pads a row is left out.
    """
    collections = [each for each in model.modules() if isinstance(each, EmbeddingBagCollection)]
    return dict(item for each in collections for tbe in each._emb_modules for item in _rows(tbe))


def _rows(tbe: Any) -> list[tuple[str, NDArray[Any]]]:
    weights = tbe.split_embedding_weights_with_scale_bias(0)
    return [
        (name, np.ascontiguousarray(rows.numpy()[:, : width(dim, kind.bit_rate())]))
        for (name, _, dim, kind, _), (rows, *_) in zip(tbe.embedding_specs, weights, strict=True)
    ]
