"""Multiplies the gradient with which a backward begins by the loss scale, whatever the loss was computed from.

`loss.backward()` and `torch.autograd.backward(...)` are torch functions, so a `TorchFunctionMode` sees them before they
begin. That does not depend on what the model returned, on which of its methods was called or on what else is in the
loss. The mode is at the bottom of the thread's stack of modes (as torch's default device is), from a forward until the
next `step()`, so that modes that the user enters and leaves meanwhile are not disturbed.

A backward is scaled if its graph reaches parameters of a model that computes in float16. Everything else that it
reaches (inputs, parameters of other models) gets its gradient divided by the scale again: it is what it is without one.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from zero_infinity._torch import (
    change_function_modes,
    current_graph_task_id,
    no_torch_function,
)
from zero_infinity.optim.gradient_hook import GradientHook
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.params.offloaded_param import managed

# The node of torch.utils.checkpoint with use_reentrant=True: what it recomputes is not in the graph.
_REENTRANT = "CheckpointFunctionBackward"
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)


class BackwardScaling:
    """Scales the backwards of one model, in each thread that computes a loss."""

    def __init__(self, loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._threads: set[int] = set()  # that have a mode

    def expect_backward(self) -> None:
        """The model's values are read: a backward may follow."""
        thread = threading.get_ident()
        if thread not in self._threads and torch.is_grad_enabled() and current_graph_task_id() < 0:
            self._threads.add(thread)
            change_function_modes(lambda modes: [_ScaleBackward(self._loss_scale), *filter(_is_wanted, modes)])

    def end_step(self) -> None:
        """No backward is expected before the next forward."""
        thread = threading.get_ident()
        if thread in self._threads:
            self._threads.remove(thread)
            change_function_modes(
                lambda modes: [
                    m for m in modes if _is_wanted(m) and getattr(m, "loss_scale", None) is not self._loss_scale
                ]
            )


class _ScaleBackward(TorchFunctionMode):
    """Scales a backward that reaches the parameters of one loss scale."""

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__()
        self._loss_scale = weakref.ref(loss_scale)

    @property
    def loss_scale(self) -> LossScale | None:
        """None if its model is gone."""
        return self._loss_scale()

    def __torch_function__(
        self, func: Callable[..., Any], _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func not in _BACKWARDS:  # first, and with nothing read before: torch.compile traces this for any function
            return func(*args, **keywords)
        mine = self.loss_scale
        if mine is None:
            return func(*args, **keywords)
        leaves = Leaves(_tuple_of(args[0]), keywords.get("inputs"))
        with ExitStack() as stack:
            if current_graph_task_id() >= 0:
                # Recomputed in a backward: its gradient comes from there, and is scaled if that is.
                for factor in [scale.applied for scale in leaves.scales if scale.applied is not None][:1]:
                    leaves.unscale_others(stack, factor, only=nn.Parameter)
            elif mine.applied is None and (mine in leaves.scales or leaves.has_reentrant):
                scales = leaves.scales or [mine]
                roots = _tuple_of(args[0])
                factor = min(first_factor(scale, root) for scale in scales for root in roots)
                func, args = torch.autograd.backward, _begun(roots, keywords, factor)
                leaves.unscale_others(stack, factor)
                for scale in scales:
                    stack.enter_context(scale.applying(factor))
            return func(*args, **keywords)


def _is_wanted(mode: Any) -> bool:
    return not isinstance(mode, _ScaleBackward) or mode.loss_scale is not None


class Leaves:
    """What a backward from these roots gives gradients to."""

    def __init__(self, roots: Sequence[torch.Tensor | GradientEdge], inputs: Any) -> None:
        self.scales: list[LossScale] = []  # of the models whose parameters it reaches
        self.others: list[torch.Tensor] = []
        self.has_reentrant = False
        wanted = None if inputs is None else list(inputs.values() if isinstance(inputs, dict) else _tuple_of(inputs))
        for leaf in self._reached(roots) if wanted is None else (i for i in wanted if isinstance(i, torch.Tensor)):
            known = managed(leaf)
            hook = known.gradient_hook if known is not None else None
            scale = hook.loss_scale if isinstance(hook, GradientHook) else None
            if scale is None:
                self.others.append(leaf)
            elif scale not in self.scales:
                self.scales.append(scale)

    def unscale_others(self, stack: ExitStack, factor: float, only: type[torch.Tensor] = torch.Tensor) -> None:
        """Divide the gradients of all leaves that have no loss scale, until the stack ends."""
        for leaf in self.others:
            if isinstance(leaf, only) and leaf.requires_grad:
                with no_torch_function():
                    stack.callback(leaf.register_hook(lambda gradient: gradient / factor).remove)

    def _reached(self, roots: Iterable[torch.Tensor | GradientEdge]) -> Iterator[torch.Tensor]:
        with no_torch_function():
            edges = [
                root if isinstance(root, GradientEdge) else get_gradient_edge(root)
                for root in roots
                if isinstance(root, GradientEdge) or root.requires_grad
            ]
        pending: list[Node] = [edge.node for edge in edges]
        seen = set(pending)
        while pending:
            node = pending.pop()
            self.has_reentrant = self.has_reentrant or node.name() == _REENTRANT
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                yield leaf
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)


def first_factor(scale: LossScale, root: torch.Tensor | GradientEdge) -> float:
    """Return the scale with which the backward of this root begins: a loss in float16 holds up to 65504."""
    if isinstance(root, GradientEdge) or not root.is_floating_point():
        return scale.scale
    return min(scale.scale, 2.0 ** math.floor(math.log2(torch.finfo(root.dtype).max)))


def _begun(roots: Sequence[torch.Tensor | GradientEdge], keywords: dict[str, Any], factor: float) -> tuple[Any, Any]:
    """Return the roots of a backward and the gradients with which it begins. Takes those from the keywords."""
    given = keywords.pop("gradient", None)
    given = keywords.pop("grad_tensors", None) if given is None else given
    gradients = [None] * len(roots) if given is None else _tuple_of(given)
    return roots, [_scaled(*pair, factor) for pair in zip(roots, gradients, strict=True)]


def _scaled(root: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    if gradient is not None:
        return gradient * factor
    if isinstance(root, GradientEdge) or not root.requires_grad or root.numel() != 1:
        return None  # torch refuses it, or gives it no gradient
    return torch.ones_like(root, memory_format=torch.preserve_format) * factor


def _tuple_of(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, torch.Tensor | GradientEdge) else tuple(value)
