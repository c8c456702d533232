"""Runs the backwards of all micro-batches through one block before the next, the last block first.

A parameter gets its gradients in the order of the micro-batches, as in a loop. If several pieces of the graph use it (a
tied embedding), a loop adds up its parts of one micro-batch before those of the next. So such a part is kept until the
first piece of its micro-batch that uses the parameter runs, where it is a root like that of a border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zero_infinity._torch import gradient_hooks, no_torch_function
from zero_infinity.accumulation.cut_graph import Border, CannotCutError, CutGraph, Leaf, Piece
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.gradient_hook import GradientHook
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.scaled_backward import first_factor
from zero_infinity.params.unit import ManagedParameter, Unit


class KeptGradient(Protocol):
    """A gradient that is kept elsewhere."""

    def restore(self) -> torch.Tensor: ...


Keep = Callable[[torch.Tensor], KeptGradient]


class PieceByPiece:
    """The backward of one micro-batch."""

    def __init__(self, graph: CutGraph, loss: torch.Tensor, gradients: GradientFlow, keep: Keep) -> None:
        self.pieces: list[Piece | None] = [*graph.end(loss)]
        self._loss: torch.Tensor | None = loss
        self._gradients = gradients
        self._keep = keep
        self._parts: dict[ManagedParameter, KeptGradient] = {}
        self._factor = 1.0
        for leaf in self.leaves():
            _check_leaf(leaf)

    def leaves(self) -> Iterator[Leaf]:
        """Yield what accumulates gradients."""
        found = (leaf for piece in self.pieces if piece is not None for leaf in piece.leaves)
        yield from {id(leaf): leaf for leaf in found}.values()

    def scale_by(self, scale: LossScale) -> float:
        """Scale all gradients from the first piece that runs on; returns by how much."""
        if self._loss is not None:
            self._factor = first_factor(scale, self._loss)
        return self._factor

    def run(self, number: int) -> None:
        """Run one piece; those after it have run."""
        piece, self.pieces[number] = self.pieces[number], None
        if piece is None:
            return
        roots: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        if self._loss is not None:  # of the last piece
            roots.append(get_gradient_edge(self._loss))
            gradients.append(torch.full_like(self._loss, self._factor))
            self._loss = None
        for border in piece.borders:
            if border.gradient is not None:
                roots.append(border.source)
                gradients.append(border.gradient)
                border.gradient = None
        if piece.strays and roots:
            _run_strays(piece.strays, roots, gradients)
        for border, cut in piece.cuts:
            if border.gradient is not None:
                roots.append(cut)
                gradients.append(border.gradient)
                border.gradient = None
        for leaf in piece.leaves:
            part = self._parts.pop(leaf.parameter, None) if leaf.parameter is not None else None
            if part is not None:
                roots.append(GradientEdge(leaf.node, 0))
                gradients.append(part.restore())
        if not roots:
            return
        with self._keeping_parts([leaf for leaf in piece.leaves if leaf.pieces[-1] != number]):
            _run_piece(piece, roots, gradients)

    @contextmanager
    def _keeping_parts(self, leaves: Sequence[Leaf]) -> Iterator[None]:
        """Inside, gradients of these leaves are parts."""
        parts = self._gradients.partial
        parts.update((leaf.parameter, None) for leaf in leaves if leaf.parameter is not None)
        try:
            yield
            for parameter, part in parts.items():
                if part is not None:
                    self._parts[parameter] = self._keep(part)
        finally:
            parts.clear()


def _run_strays(strays: Sequence[Border], roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    """Compute the gradients of tensors of earlier pieces, and of nothing else."""
    edges = [border.source for border in strays]
    found = torch.autograd.grad(roots, edges, gradients, retain_graph=True, allow_unused=True)
    for border, gradient in zip(strays, found, strict=True):
        if border.gradient is not None and gradient is not None:
            border.gradient = border.gradient + gradient
        elif gradient is not None:
            border.gradient = gradient


def _run_piece(piece: Piece, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor]) -> None:
    if not piece.strays:
        torch.autograd.backward(roots, gradients)
        return
    # Autograd would go on from strays: name all other ends.
    ends = [*(cut for _, cut in piece.cuts), *(GradientEdge(leaf.node, 0) for leaf in piece.leaves)]
    if ends:
        torch.autograd.backward(roots, gradients, inputs=ends)


class LayerMajorBackward:
    """The backwards of the micro-batches of one step."""

    def __init__(self, num_micro_batches: int, gradients: GradientFlow, keep: Keep) -> None:
        self._num_micro_batches = num_micro_batches
        self._gradients = gradients
        self._keep = keep
        self._micro_batches: list[PieceByPiece] = []

    def add(self, graph: CutGraph, loss: torch.Tensor) -> None:
        """The forward of the next micro-batch has ended."""
        self._micro_batches.append(PieceByPiece(graph, loss, self._gradients, self._keep))

    def check_units(self) -> None:
        """Raise if the gradients of a unit, which ranks sum together, would come apart."""
        for micro_batch in self._micro_batches:
            check_units(micro_batch.leaves())

    def run_last_piece(self) -> None:
        """Run what comes after the blocks of the micro-batch that was added last."""
        micro_batch = self._micro_batches[-1]
        self._run(micro_batch, len(micro_batch.pieces) - 1)

    def run(self, *, is_uniform: bool) -> None:
        """Run all pieces that are left: block by block if the forwards are `uniform`, else one after another."""
        if not is_uniform:
            for micro_batch in self._micro_batches:
                for number in reversed(range(len(micro_batch.pieces))):
                    self._run(micro_batch, number)
            return
        for number in reversed(range(len(self._micro_batches[0].pieces))):
            for micro_batch in self._micro_batches:
                self._run(micro_batch, number)

    def _run(self, micro_batch: PieceByPiece, number: int) -> None:
        is_last = micro_batch is self._micro_batches[-1] and len(self._micro_batches) == self._num_micro_batches
        scale = self._gradients.loss_scale
        with nullcontext() if is_last else self._gradients.accumulating():
            if scale is None:
                micro_batch.run(number)
            else:
                with _scaling(micro_batch, number, scale):
                    micro_batch.run(number)


@contextmanager
def _scaling(micro_batch: PieceByPiece, number: int, scale: LossScale) -> Iterator[None]:
    """Inside, one piece is run, scaled; what has no scale gets its gradients as they are without."""
    factor = micro_batch.scale_by(scale)
    piece = micro_batch.pieces[number]
    with ExitStack() as stack, scale.applying(factor):
        for leaf in piece.leaves if piece is not None else ():
            if not _is_trained(leaf):
                stack.callback(leaf.tensor.register_hook(lambda gradient: gradient / factor).remove)
        yield


def check_units(leaves: Iterable[Leaf]) -> None:
    """Raise if the gradients of one unit, which ranks sum together, come from several pieces."""
    piece_of: dict[Unit, int] = {}
    for leaf in leaves:
        for part in leaf.parameter.parts if leaf.parameter is not None else ():
            if piece_of.setdefault(part.unit, leaf.pieces[-1]) != leaf.pieces[-1]:
                raise CannotCutError(f"parameters that ranks sum together ({part.unit.name!r}) are used apart")


def _check_leaf(leaf: Leaf) -> None:
    if len(leaf.pieces) == 1:
        return
    parameter = leaf.parameter
    if parameter is None or not _is_trained(leaf):
        raise CannotCutError("a tensor that is no parameter of the model gets gradients from several blocks")
    if len(parameter.parts) > 1 or parameter.parts[0] is not parameter:
        raise CannotCutError(f"{parameter.name!r} is used in several places, and in tiles")
    with no_torch_function():
        hooks = gradient_hooks(leaf.tensor)
    if hooks != (0, 1):  # ours
        raise CannotCutError(f"{parameter.name!r} is used in several places, and has a gradient hook")


def _is_trained(leaf: Leaf) -> bool:
    return leaf.parameter is not None and isinstance(leaf.parameter.gradient_hook, GradientHook)
