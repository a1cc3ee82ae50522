"""What the tracker needs compiled is compiled when it is made."""

from typing import Any

import pytest
import torch
from tests.support.embedding_parameters import embedding_parameters
from torch import nn

from deltasync.kernels import changes, digests, id_maps, marks
from deltasync.kernels.compiled import Kernel
from deltasync.trainer.tracking import Tracker, TrackerOptions


def refuse(kernel: object) -> None:
    raise AssertionError(f"{kernel} is compiled in the middle of a step")


def test_no_step_and_no_read_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (changes, digests, id_maps, marks):
        for kernel in vars(room).values():
            if isinstance(kernel, Kernel):
                monkeypatch.setattr(kernel, "_compiled", None)
    model: Any = nn.ParameterDict({"t": torch.ones(4, 2)})
    with embedding_parameters():
        tracker = Tracker(model, TrackerOptions(dense=True))
    monkeypatch.setattr(Kernel, "compile", refuse)
    model.t.data[1] = 2
    tracker.delete("t", torch.tensor([2]))
    tracker.step()
    delta = tracker.get_delta()
    assert (delta.rows["t"].ids.tolist(), delta.deletes["t"].ids.tolist()) == ([1], [2])
    assert tracker.acknowledge(delta.token)
    tracker.mark_all()
    assert tracker.get_delta().rows["t"].ids.tolist() == [0, 1, 2, 3]
