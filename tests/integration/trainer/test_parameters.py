"""Parameters and buffers arrive with the names and shapes that they have in the trainer, or are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from tests.integration.trainer.following import WAIT
from tests.support.server import RunningService
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from deltasync.client import DeltasyncError, Subscriber, SubscriberOptions
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.trainer.sync import DeltaSync, SyncOptions

# torch.compile imports what torch itself no longer likes.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")


class Tied(nn.Module):
    """Scores items by the vectors that they are read as: its decoder has the weight of its encoder, or its own."""

    encoder: nn.Linear
    decoder: nn.Linear

    def __init__(self, *, tied: bool = True, decoder_first: bool = False) -> None:
        super().__init__()
        parts = {"encoder": nn.Linear(4, 6, bias=False), "decoder": nn.Linear(4, 6, bias=False)}
        for name in sorted(parts, reverse=not decoder_first):
            self.add_module(name, parts[name])
        if tied:
            parts["decoder"].weight = parts["encoder"].weight


class Shaped(nn.Module):
    def __init__(self, *shape: int, buffer: bool = False) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("heads", torch.randn(shape))
        else:
            self.heads = nn.Parameter(torch.randn(shape))


class Ranker(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda part: part) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.over = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def publish_to(service: RunningService, trained: nn.Module, served: nn.Module) -> None:
    """Publish a model, and have another one follow it."""
    with DeltaSync(trained, SyncOptions(service=service.grpc, model="clicks")) as sync:
        head = sync.flush(WAIT)
    options = SubscriberOptions(service=service.grpc, consumer="predictors", replica="a")
    with Subscriber(options, TorchTarget(served.eval())) as replica:
        replica.wait_for(head, WAIT)


def plain(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's state under the names that it has without torch.compile and DataParallel."""
    state: dict[str, torch.Tensor] = module.state_dict()
    return {name.replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in state.items()}


def assert_same(trained: nn.Module, served: nn.Module) -> None:
    expected, found = plain(trained), plain(served)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def compiled(module: nn.Module) -> nn.Module:
    made = torch.compile(module)
    assert isinstance(made, nn.Module)
    return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Ranker,
    "DataParallel": lambda: DataParallel(Ranker()),
    "all compiled": lambda: compiled(Ranker()),
    "activation checkpointing": lambda: Ranker(checkpoint_wrapper),
    "torch.compile": lambda: Ranker(compiled),
    "both": lambda: Ranker(lambda part: compiled(checkpoint_wrapper(part))),
}


@pytest.mark.parametrize("wrapper", MODELS)
@pytest.mark.parametrize("wrapped", ["trainer", "predictor"])
def test_wrappers_change_no_name(running: RunningService, wrapper: str, wrapped: str) -> None:
    made = MODELS[wrapper]()
    trained, served = (made, Ranker()) if wrapped == "trainer" else (Ranker(), made)
    publish_to(running, trained, served)
    assert_same(trained, served)
    names = {line["table"] for line in running.get_json("/tables")}
    assert names == set(Ranker().state_dict()), "the names are those of state_dict()"


@pytest.mark.parametrize("decoder_first", [False, True])
def test_tied_weights_arrive_under_each_of_their_names(running: RunningService, decoder_first: bool) -> None:
    trained, served = Tied(), Tied(decoder_first=decoder_first)
    publish_to(running, trained, served)
    assert_same(trained, served)
    assert len(running.get_json("/tables")) == 1


class Shared(nn.Module):
    """The same module in two places, or two of the same shape."""

    def __init__(self, *, shared: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.decoder = self.encoder if shared else nn.Linear(4, 6)


def test_a_module_in_two_places_has_both_names(running: RunningService) -> None:
    trained, served = Shared(), Shared()
    publish_to(running, trained, served)
    assert_same(trained, served)
    with pytest.raises(DeltasyncError, match=r"decoder\.weight and encoder\.weight are one tensor in the trainer"):
        publish_to(running, trained, Shared(shared=False))


def test_a_run_whose_model_names_its_parts_in_another_order_goes_on(running: RunningService) -> None:
    publish_to(running, Tied(), Tied())
    trained, served = Tied(decoder_first=True), Tied()
    publish_to(running, trained, served)
    assert_same(trained, served)
    with pytest.raises(DeltasyncError, match=r"has 'encoder\.weight' in table 'decoder\.weight'"):
        publish_to(running, Tied(tied=False), Tied(tied=False))


@pytest.mark.parametrize("tied_in_trainer", [True, False])
def test_a_part_that_is_left_out_takes_no_tied_weight_with_it(
    running: RunningService, tied_in_trainer: bool
) -> None:
    trained = Tied(tied=tied_in_trainer)
    served = nn.ModuleDict({"encoder": nn.Linear(4, 6, bias=False)}) if tied_in_trainer else Tied()
    with DeltaSync(trained, SyncOptions(service=running.grpc, model="clicks")) as sync:
        head = sync.flush(WAIT)
    options = SubscriberOptions(service=running.grpc, consumer="predictors", replica="a")
    with Subscriber(options, TorchTarget(served.eval(), leave_out=["decoder.*"])) as replica:
        replica.wait_for(head, WAIT)
    torch.testing.assert_close(served.get_parameter("encoder.weight"), trained.encoder.weight, rtol=0, atol=0)


def test_a_predictor_with_one_of_two_tied_parts_is_enough(running: RunningService) -> None:
    trained, served = Tied(), Tied()
    del served.encoder
    publish_to(running, trained, served)
    torch.testing.assert_close(served.decoder.weight, trained.decoder.weight, rtol=0, atol=0)


@pytest.mark.parametrize("tied_in_trainer", [True, False])
def test_a_tie_on_one_side_only_is_refused_with_both_names(running: RunningService, tied_in_trainer: bool) -> None:
    served = Tied(tied=not tied_in_trainer)
    before = copy.deepcopy(served.state_dict())
    with pytest.raises(DeltasyncError) as refused:
        publish_to(running, Tied(tied=tied_in_trainer), served)
    assert "encoder.weight" in str(refused.value)
    assert "decoder.weight" in str(refused.value)
    assert "one tensor in the" in str(refused.value)
    torch.testing.assert_close(served.state_dict(), before)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((8, 4, 3), (8, 3, 4)),
    ((16, 3, 5, 5), (16, 5, 5, 3)),
    ((6,), (1, 6)),
    ((1,), ()),
    ((8, 2, 6), (8, 3, 4)),
]


@pytest.mark.parametrize(("shape", "other"), SHAPES)
@pytest.mark.parametrize("buffer", [False, True])
def test_another_shape_of_as_many_values_is_refused(
    running: RunningService, shape: tuple[int, ...], other: tuple[int, ...], buffer: bool
) -> None:
    trained = Shaped(*shape, buffer=buffer)
    with pytest.raises(DeltasyncError) as refused:
        publish_to(running, trained, Shaped(*other, buffer=buffer))
    assert f"{list(shape)}" in str(refused.value)
    assert f"{list(other)}" in str(refused.value)
    served = Shaped(*shape, buffer=buffer)
    publish_to(running, trained, served)
    assert_same(trained, served)


def test_a_run_with_another_shape_is_refused(running: RunningService) -> None:
    publish_to(running, Shaped(8, 4, 3), Shaped(8, 4, 3))
    with pytest.raises(DeltasyncError, match=r"of shape \[8, 4, 3\].* the run has .*of shape \[8, 3, 4\]"):
        publish_to(running, Shaped(8, 3, 4), Shaped(8, 3, 4))
