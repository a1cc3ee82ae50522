"""A function called before a tensor's backward, beside whatever else listens there."""

from collections.abc import Callable

import pytest
import torch

from deltasync.trainer.tracking.torchrec_hooks import call_in_backward


def notes(said: list[str], name: str) -> Callable[[torch.Tensor], None]:
    return lambda _gradient: said.append(name)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.ones(2, 2, requires_grad=True)


def test_it_is_called_once_before_the_gradient_goes_on_and_changes_nothing(weight: torch.Tensor) -> None:
    said = list[str]()
    output = (2 * weight).view(-1)
    call_in_backward(output, notes(said, "ours"))
    weight.register_hook(notes(said, "weight"))  # type: ignore[no-untyped-call]
    assert said == []
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert said == ["ours", "weight"]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_not_where_the_backward_does_not_come_by(weight: torch.Tensor) -> None:
    said = list[str]()
    call_in_backward(2 * weight, notes(said, "ours"))
    (3 * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert said == []


@pytest.mark.parametrize("order", [("ours", "ours again", "theirs"), ("theirs", "ours", "ours again")])
def test_several_listen_to_one_output(order: tuple[str, ...], weight: torch.Tensor) -> None:
    said = list[str]()
    output = 2 * weight
    for name in order:
        listen = output.register_hook if name == "theirs" else lambda note: call_in_backward(output, note)
        listen(notes(said, name))
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert said == list(order)


def test_another_hook_can_be_taken_off_again(weight: torch.Tensor) -> None:
    said = list[str]()
    output = 2 * weight
    call_in_backward(output, notes(said, "ours"))
    output.register_hook(notes(said, "theirs")).remove()  # type: ignore[no-untyped-call]
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert said == ["ours"]


def test_a_parameter_itself(weight: torch.Tensor) -> None:
    said = list[str]()
    call_in_backward(weight, notes(said, "ours"))
    (2 * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert said == ["ours"]
