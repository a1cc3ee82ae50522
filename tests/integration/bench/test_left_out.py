"""What `python -m tests.bench pipelines` says cannot train on a CPU cannot, for the reason that it gives."""

from contextlib import ExitStack

import pytest
import torch
from tests.bench.pipelines.batches import draw
from tests.bench.pipelines.options import Sizes
from tests.bench.pipelines.rank import Training
from tests.bench.pipelines.variants import VARIANTS, VariantContext, trainable

# By TorchRec of a KeyedJaggedTensor; by Python of `torch.cpu.Stream`, which has no device to compare.
_SAID = "unknown parameter type|'Stream' object has no attribute 'device'"
CPU = torch.device("cpu")
NOT_ON_CPU = [name for name, variant in VARIANTS.items() if variant.not_on_cpu]
# TorchRec wraps models in DDP as torch no longer likes.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("name", NOT_ON_CPU)
def test_torchrec_fails_where_it_is_said_to(name: str) -> None:
    sizes = Sizes(batch_size=4, tables=2, rows=8, dim=4, ids=2, dense=2, over=4)
    context = VariantContext("localhost:1", sizes.steps)
    with ExitStack() as stack:
        training = Training(VARIANTS[name], sizes, draw(sizes, 0, CPU), CPU, context, stack)
        with pytest.raises((RuntimeError, AttributeError), match=_SAID) as failure:
            training.turn(1)
    assert "record_stream" in [entry.name for entry in failure.traceback]


def test_on_a_gpu_nothing_is_left_out() -> None:
    assert trainable(VARIANTS, torch.device("cuda")) == (VARIANTS, {})
