"""Embedding modules with given rows."""

import torch
from torch import nn


def embedding(rows: torch.Tensor) -> nn.Embedding:
    """A trainable embedding with these rows, [n, d]."""
    return nn.Embedding(len(rows), rows.shape[1], _weight=rows)
