from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from zero_infinity.accumulation.cut_graph import CannotCutError, CutGraph
from zero_infinity.accumulation.layer_major_backward import LayerMajorBackward


class Gradients:
    """Notes when parameters get gradients, as the engine's flow of gradients."""

    def __init__(self) -> None:
        self.partial: dict[object, torch.Tensor | None] = {}
        self.loss_scale = None
        self.only_adds = False
        self.came: list[tuple[str, bool]] = []

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.only_adds = True
        yield
        self.only_adds = False

    def hook(self, name: str, parameter: nn.Parameter) -> None:
        parameter.register_post_accumulate_grad_hook(lambda _: self.came.append((name, self.only_adds)))


def forward(graph: CutGraph | None, parameters: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    for number, parameter in enumerate(parameters):
        if number and graph is not None:
            graph.begin_piece()
            (x,) = graph.cut((x,))
        x = x + (x @ parameter).tanh()
    return x.square().mean()


def prepared(num: int = 3) -> tuple[list[nn.Parameter], Gradients, LayerMajorBackward]:
    torch.manual_seed(0)
    parameters, gradients = [nn.Parameter(torch.randn(4, 4)) for _ in range(num)], Gradients()
    for number, parameter in enumerate(parameters):
        gradients.hook(str(number), parameter)
    return parameters, gradients, LayerMajorBackward(2, gradients, pytest.fail)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_uniform", [True, False])
def test_the_order_and_the_sums(is_uniform: bool) -> None:
    parameters, gradients, backward = prepared()
    batches = [torch.randn(2, 4) for _ in range(2)]
    for number, batch in enumerate(batches):
        graph = CutGraph()
        backward.add(graph, forward(graph, parameters, batch))
        if is_uniform and not number:
            backward.run_last_piece()
    backward.run(is_uniform=is_uniform)
    order = "221100" if is_uniform else "210210"
    assert [name for name, _ in gradients.came] == list(order)
    assert {is_added for _, is_added in gradients.came} == {True, False}
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for batch in batches:
        forward(None, parameters, batch).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, parameters, strict=True))


def test_a_tensor_of_nobody_in_two_pieces_is_refused() -> None:
    parameters, _, backward = prepared(2)
    graph = CutGraph()
    with pytest.raises(CannotCutError):
        backward.add(graph, forward(graph, [parameters[0], parameters[0]], torch.randn(2, 4)))
