"""Autograd's graph of one forward, cut where blocks begin, so that backward can run piece by piece.

A tensor that enters a block is replaced by a *cut*: the same values, and a node that keeps the gradient it gets
instead of passing it on. So each piece of the graph (what comes before the blocks, each block, what comes after them)
can be run on its own, with the gradients that later pieces have left as its roots.

The sums are those of the uncut graph, bit for bit. There, autograd runs nodes in the reverse order of their creation
and adds gradients of one tensor as they come; pieces in reverse order are the same order. Where several pieces use a
tensor (the encoder's output), the sum so far is a root of the next piece, which is added first.

A tensor may also get from one piece to another without entering a block (the logits of a router, recorded for a loss).
It is a *stray*: its gradient is computed by itself, and the rest of the piece is then run without it.

Nodes are numbered in the order of their creation, so a number tells the piece.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zero_infinity._torch import no_torch_function, sequence_number, tree_flatten, tree_unflatten, version_of
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter

_LEAF = "AccumulateGrad"
# The node of torch.utils.checkpoint with use_reentrant=True: what it recomputes is not in the graph.
_REENTRANT = "CheckpointFunctionBackward"


class CannotCutError(Exception):
    """The graph cannot be cut at the blocks; the message says why."""


class Border:
    """A tensor that enters blocks: where its gradient goes, and what it has got so far."""

    def __init__(self, source: GradientEdge) -> None:
        self.source = source
        self.gradient: torch.Tensor | None = None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, source: list[torch.Tensor], border: Border) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.border = border
        # In a list, because an output that is an input would be a view of it.
        return source.pop().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        if ctx.border.gradient is not None:
            raise RuntimeError("a gradient of a tensor that enters a block would be lost")
        ctx.border.gradient = gradients[0]
        return None, None, None


def border_of(node: Node) -> Border | None:
    """Return the border at which this node is a cut, if it is one."""
    border = getattr(node, "border", None)
    return border if isinstance(border, Border) else None


@dataclass(frozen=True, eq=False, slots=True)
class CutTensor:
    """A tensor, the node that computed it, and its cut."""

    source: torch.Tensor
    node: Node
    cut: torch.Tensor


@dataclass(eq=False, slots=True)
class Leaf:
    """A tensor that accumulates gradients, and the pieces that use it, the last one first."""

    tensor: torch.Tensor
    node: Node
    parameter: ManagedParameter | None
    pieces: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Piece:
    """A part of the graph: where it is entered, and what is at its ends."""

    borders: list[Border] = field(default_factory=list)  # whose tensors it has computed
    cuts: list[tuple[Border, GradientEdge]] = field(default_factory=list)  # that it reaches
    strays: list[Border] = field(default_factory=list)  # of tensors of earlier pieces that it reaches without a cut
    leaves: list[Leaf] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Found:
    """What was found of a graph so far."""

    pieces: list[Piece]
    leaves: dict[int, Leaf] = field(default_factory=dict)


class CutGraph:
    """The graph of one forward."""

    def __init__(self) -> None:
        self._anchor = torch.zeros((), requires_grad=True)
        self._starts: list[int] = []  # the number of the first node of each piece but the first
        self._borders: dict[tuple[Node, int], Border] = {}
        # What was cut at the last place, by id: a tensor that enters block after block is cut once.
        self._last: dict[int, CutTensor] = {}

    # ------------------------------------------------------------------ forward

    def begin_piece(self) -> None:
        """The nodes that are made from now on belong to another piece."""
        with torch.enable_grad():
            node = self._anchor.view_as(self._anchor).grad_fn
        self._starts.append(sequence_number(node))

    def cut(self, values: Any) -> Any:
        """Return nested values with cuts of all tensors that need one."""
        leaves, structure = tree_flatten(values)
        known: dict[int, CutTensor] = {}
        cut_leaves = [self._cut(v, known) if isinstance(v, torch.Tensor) else v for v in leaves]
        self._last = known
        return tree_unflatten(cut_leaves, structure)

    def versions(self) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors that were cut last, and their versions."""
        return [(known.source, version_of(known.source)) for known in self._last.values()]

    def _cut(self, tensor: torch.Tensor, known: dict[int, CutTensor]) -> torch.Tensor:
        with no_torch_function():
            node = tensor.grad_fn
        if node is None or not torch.is_grad_enabled():
            return tensor
        if id(tensor) not in known:
            before = self._last.get(id(tensor))
            is_same = before is not None and before.node is node
            known[id(tensor)] = before if is_same and before else CutTensor(tensor, node, self._cut_of(tensor, node))
        return known[id(tensor)].cut

    def _cut_of(self, tensor: torch.Tensor, node: Node) -> torch.Tensor:
        if border_of(node) is not None:
            return tensor
        if type(tensor) is not torch.Tensor:
            raise CannotCutError(f"a {type(tensor).__name__} enters a block")
        edge = get_gradient_edge(tensor)
        border = self._borders.setdefault((edge.node, edge.output_nr), Border(edge))
        made: torch.Tensor = _Cut.apply(self._anchor, [tensor], border)  # type: ignore[no-untyped-call]
        return made

    # ------------------------------------------------------------------ pieces

    def end(self, loss: torch.Tensor) -> list[Piece]:
        """The forward has ended: return the pieces."""
        self._last.clear()
        if not loss.requires_grad:
            raise CannotCutError("the loss does not depend on a parameter")
        pieces = [Piece() for _ in range(len(self._starts) + 1)]
        for border in self._borders.values():
            pieces[self._piece_of(border.source.node)].borders.append(border)
        found = _Found(pieces)
        with no_torch_function():
            for number in reversed(range(len(pieces))):
                roots = [border.source.node for border in pieces[number].borders]
                if number == len(pieces) - 1:
                    roots.append(get_gradient_edge(loss).node)
                self._walk(list(dict.fromkeys(roots)), number, pieces[number], found)
                _check_apart(pieces[number].strays)
        return pieces

    def _piece_of(self, node: Node) -> int:
        return bisect_right(self._starts, sequence_number(node))

    def _walk(self, roots: list[Node], number: int, piece: Piece, found: _Found) -> None:
        """Find the ends of a piece."""
        seen, pending = set(roots), list(roots)
        strays: dict[tuple[Node, int], list[int]] = {}  # the nodes that use them
        last_use: dict[Border, int] = {}  # of a cut
        while pending:
            node = pending.pop()
            if type(node).__name__ == _REENTRANT:
                raise CannotCutError("torch.utils.checkpoint is called with use_reentrant=True")
            for following, output in node.next_functions:
                if following is None:
                    continue
                is_new = following not in seen
                if is_new and type(following).__name__ == _LEAF:
                    seen.add(following)
                    self._note_leaf(following, number, piece, found)
                elif (border := border_of(following)) is not None:
                    last_use[border] = max(last_use.get(border, 0), sequence_number(node))
                    if is_new and any(other is border for other, _ in piece.cuts):
                        raise CannotCutError("a tensor enters a block twice, in different ways")
                    if is_new:
                        seen.add(following)
                        piece.cuts.append((border, GradientEdge(following, 0)))
                elif is_new and self._piece_of(following) == number:
                    seen.add(following)
                    pending.append(following)
                elif following not in seen:
                    strays.setdefault((following, output), []).append(sequence_number(node))
        for (node, output), uses in strays.items():
            border = self._stray(node, output, number, len(uses), found)
            # Its gradient is added before that of the cut, as in the uncut graph if it is used after the block.
            if min(uses) < last_use.get(border, 0):
                raise CannotCutError(f"a tensor enters a block, and gets into it past its arguments ({node.name()})")
            piece.strays.append(border)

    def _stray(self, node: Node, output: int, number: int, num_uses: int, found: _Found) -> Border:
        """Return the border of a tensor that gets to a later piece past the arguments of its blocks."""
        home = self._piece_of(node)
        if home > number:
            raise CannotCutError(f"a tensor was computed before the forward ({node.name()})")
        border = self._borders.get((node, output))
        if border is None:
            border = self._borders[node, output] = Border(GradientEdge(node, output))
            found.pieces[home].borders.append(border)
        elif num_uses > 1:
            # The uses are added up before they are added to those of later pieces: not as in the uncut graph.
            raise CannotCutError(f"a tensor is used by several blocks past their arguments ({node.name()})")
        return border

    def _note_leaf(self, node: Node, number: int, piece: Piece, found: _Found) -> None:
        tensor: torch.Tensor = node.variable  # type: ignore[attr-defined]
        if tensor is self._anchor:
            return
        leaf = found.leaves.setdefault(id(tensor), Leaf(tensor, node, managed(tensor)))
        leaf.pieces.append(number)
        piece.leaves.append(leaf)


def _check_apart(strays: list[Border]) -> None:
    """Raise if one of the strays of a piece was computed from another: its gradient would have both ways in it."""
    nodes = {border.source.node for border in strays}
    for stray in nodes if len(nodes) > 1 else ():
        seen, pending = {stray}, [stray]
        while pending:
            for following, _ in pending.pop().next_functions:
                if following in nodes and following is not stray:
                    raise CannotCutError("tensors get from block to block past their arguments, one from another")
                if following is not None and following not in seen and border_of(following) is None:
                    seen.add(following)
                    pending.append(following)
