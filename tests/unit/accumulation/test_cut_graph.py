from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_infinity.accumulation.cut_graph import CannotCutError, CutGraph, Piece


def weights(number: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8) / 3) for _ in range(number)]


def run(pieces: list[Piece], loss: torch.Tensor) -> None:
    """Run all pieces in reverse: parameters add up by themselves, and each tensor enters one block."""
    torch.autograd.backward(loss)
    for piece in reversed(pieces[:-1]):
        torch.autograd.backward([b.source for b in piece.borders], [b.gradient for b in piece.borders])


def blocks(graph: CutGraph, parameters: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    x = (x @ parameters[0]).tanh()
    for parameter in parameters[1:]:
        graph.begin_piece()
        (x,) = graph.cut((x,))
        x = x + (x @ parameter).tanh()
    return x


def test_pieces_have_the_gradients_of_the_whole() -> None:
    x = torch.randn(4, 8)
    plain = weights()
    y = (x @ plain[0]).tanh()
    for parameter in plain[1:]:
        y = y + (y @ parameter).tanh()
    y.square().mean().backward()
    cut, graph = weights(), CutGraph()
    loss = blocks(graph, cut, x).square().mean()
    pieces = graph.end(loss)
    assert [[leaf.tensor is p for leaf in piece.leaves] for piece, p in zip(pieces, cut, strict=True)] == [[True]] * 3
    run(pieces, loss)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, cut, strict=True))


def test_a_piece_ends_at_its_cuts() -> None:
    cut, graph = weights(), CutGraph()
    loss = blocks(graph, cut, torch.randn(4, 8)).sum()
    graph.end(loss)
    loss.backward()
    assert [p.grad is not None for p in cut] == [False, False, True]


def test_a_tensor_that_enters_several_blocks_is_cut_once() -> None:
    graph = CutGraph()
    memory = weights()[0] * 2
    cuts = []
    for _ in range(2):
        graph.begin_piece()
        cuts.append(graph.cut({"memory": memory, "mask": torch.ones(2), "n": 3}))
    assert cuts[0]["memory"] is cuts[1]["memory"]
    assert cuts[0]["memory"] is not memory
    memory.mul_(2)  # another tensor, for autograd
    graph.begin_piece()
    assert graph.cut({"memory": memory})["memory"] is not cuts[0]["memory"]


def test_a_stray_is_found() -> None:
    graph = CutGraph()
    first, second = weights(2)
    x = (torch.randn(4, 8) @ first).tanh()
    logits = x * 3
    graph.begin_piece()
    (x,) = graph.cut((x,))
    pieces = graph.end((x @ second).sum() + logits.sum())
    assert [len(piece.strays) for piece in pieces] == [0, 1]
    assert pieces[1].strays[0] in pieces[0].borders


def reentrant(x: torch.Tensor, parameter: nn.Parameter, graph: CutGraph) -> torch.Tensor:
    return checkpoint(lambda x: (x @ parameter).tanh(), x, use_reentrant=True).sum()


def one_from_another(x: torch.Tensor, parameter: nn.Parameter, graph: CutGraph) -> torch.Tensor:
    logits = x @ parameter
    chances = logits.softmax(-1)
    graph.begin_piece()
    (x,) = graph.cut((x,))
    return x.sum() + logits.sum() + chances.square().sum()


def used_twice(x: torch.Tensor, parameter: nn.Parameter, graph: CutGraph) -> torch.Tensor:
    kept = x @ parameter
    for _ in range(2):
        graph.begin_piece()
        (x,) = graph.cut((x,))
        x = x * kept + kept
    return x.sum()


def no_parameter(x: torch.Tensor, parameter: nn.Parameter, graph: CutGraph) -> torch.Tensor:
    return x.detach().sum()


@pytest.mark.parametrize("loss", [reentrant, one_from_another, used_twice, no_parameter], ids=lambda f: f.__name__)
def test_what_cannot_be_cut(loss: Callable[[torch.Tensor, nn.Parameter, CutGraph], torch.Tensor]) -> None:
    graph = CutGraph()
    first, second = weights(2)
    with pytest.raises(CannotCutError):
        graph.end(loss((torch.randn(4, 8) @ first).tanh(), second, graph))
