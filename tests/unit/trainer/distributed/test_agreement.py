"""The end of an agreement, whose process group may have gone before it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from deltasync.base.errors import InvalidInput
from deltasync.trainer.distributed.agreement import Agreement


def one_rank() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    one_rank()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def assert_closed(agreement: Agreement) -> None:
    assert agreement.closed
    with pytest.raises(InvalidInput, match="is closed"):
        agreement.any_of(True)


def test_what_is_closed_agrees_on_nothing_more() -> None:
    agreement = Agreement("DeltaSync", "step")
    assert agreement.any_of(True)
    agreement.close()
    assert_closed(agreement)
    agreement.close()
    assert dist.is_initialized(), "the group that training uses is not touched"


def test_it_is_closed_after_all_groups_have_gone() -> None:
    agreement = Agreement("DeltaSync", "step")
    dist.destroy_process_group()
    agreement.close()
    assert_closed(agreement)


def test_it_is_closed_where_there_is_another_default_group_by_then() -> None:
    agreement = Agreement("DeltaSync", "step")
    dist.destroy_process_group()
    one_rank()
    agreement.close()
    assert_closed(agreement)
    assert dist.is_initialized()
