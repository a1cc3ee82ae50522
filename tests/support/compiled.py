"""A model with a compiled dense part, and the same model without compilation."""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.targets.torch_compiled import CompiledModule

KEEP: dict[str, Any] = {"always_keep_tensor_constants": True}
ROWS, DIM = 6, 4


class Over(nn.Module):
    """The dense part: matrices, a bias of one element, a buffer, and a tensor constant in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layers(features) * self.scale
        return scaled + torch.tensor([0.25, 0.5]).sum()


class Model(nn.Module):
    def __init__(self, over: nn.Module) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.over = over

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.over(self.user(ids))
        return found


def compile_over(package: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    if not shutil.which("g++"):
        pytest.skip("AOTInductor needs a C++ compiler, g++")
    batch = {"features": {0: torch.export.Dim("batch", min=1, max=1024)}}
    exported = torch.export.export(
        Over().eval().to(dtype), (torch.ones(4, DIM, dtype=dtype),), dynamic_shapes=batch
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # Of torch's own making.
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=options)
    return package


def compiled_model(package: Path) -> Model:
    return Model(CompiledModule(package)).eval()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the model that a trainer publishes and that forward reads."""
    return {name: each.detach() for name, each in model.state_dict().items() if name != "over.unused"}


def table_of(name: str, tensor: torch.Tensor) -> TableSpec:
    """A tensor as a table with the trainer's name and shape: embeddings without ".weight", a vector as one row."""
    rows, dim = (len(tensor), tensor[0].numel()) if tensor.dim() > 1 else (1, tensor.numel())
    if name == "user.weight":
        return TableSpec("user", rows, dim)
    kind = TableKind.BUFFER if name == "over.scale" else TableKind.PARAMETER
    return TableSpec(name, rows, dim, tensor.numpy().dtype, kind)


def tables_of(model: nn.Module) -> list[TableSpec]:
    return [table_of(name, each) for name, each in state_of(model).items()]


def weights(version: int) -> dict[str, torch.Tensor]:
    """The model's weights at a version."""
    torch.manual_seed(version)
    model = Model(Over())
    model.over.get_buffer("scale").fill_(version)
    return state_of(model)


def as_written(version: int) -> Model:
    """The model at a version, not compiled."""
    model = Model(Over()).eval()
    model.load_state_dict(weights(version), strict=False)
    return model


def release_of(
    version: int, state: Mapping[str, torch.Tensor], *, resync: bool = False, tables: list[TableSpec] | None = None
) -> Release:
    """All rows of some tables."""
    rows = [
        RowBatch.of_table(table, np.arange(table.rows), each.numpy().reshape(table.rows, table.dim))
        for table, each in ((table_of(name, each), each) for name, each in state.items())
    ]
    followed = tables or [table_of(name, each) for name, each in weights(1).items()]
    return Release(Position("h", version), version, 0, resync, followed, rows, version=version)
