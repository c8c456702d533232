"""Any `nn.Module` as the planner's model: run once with tensors that have shapes and no memory (meta, or fake ones).

The only file here that imports torch. Operations are counted by torch's own counter, saved values by autograd's hooks,
both for the module that runs at the moment; nothing is guessed from names except which modules repeat.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from zero_infinity.errors import ConfigError
from zero_infinity.plan.model import OUTSIDE, Model, Operator

_ROOT = "Global"  # how the counter calls everything
_HALF_BYTES = 2


def describe(
    model: nn.Module, inputs: Mapping[str, Any], *, batch: int, seq: int, name: str, dtype_bytes: int = _HALF_BYTES
) -> Model:
    """Run `model(**inputs)`, neither with any memory, and note what each of its modules does, in order.

    `dtype_bytes`: what one saved element takes in this run; saved bytes are counted in units of it.
    """
    watch = _Watch(model)
    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        stack.callback(watch.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor))
        stack.enter_context(counter)
        model(**inputs)
    flops = _own_flops(counter, model)
    tokens = batch * seq
    blocks = _blocks(model)
    operators = [
        Operator(
            module,
            watch.parameters[module],
            flops.get(module, 0.0) / tokens,
            watch.saved_bytes[module] / tokens / dtype_bytes,
            blocks.get(module, OUTSIDE),
            watch.units[module],
            not isinstance(model.get_submodule(module), nn.Embedding),
            _num_rows(model.get_submodule(module)),
        )
        for module in watch.order
    ]
    if not any(operator.num_parameters for operator in operators):
        raise ConfigError(f"{name}: the model has no parameters")
    return Model(name, tuple(operators), _hidden(watch, tokens), seq)


def outline(model: nn.Module, *, seq: int, name: str) -> Model:
    """Without running it: modules in the order in which they are registered, two operations for each weight.

    For models whose forward depends on values. Experts count as if every token went through all of them.
    """
    blocks = _blocks(model)
    operators: list[Operator] = []
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        weights = [] if isinstance(module, nn.Embedding) else [p for p in own if p.dim() > 1]
        operators.append(
            Operator(
                module_name,
                sum(parameter.numel() for parameter in own),
                2.0 * sum(weight.numel() for weight in weights),
                float(sum(sum(weight.shape[-2:]) for weight in weights)),
                blocks.get(module_name, OUTSIDE),
                owners.setdefault(id(own[0]), module_name),
                not isinstance(module, nn.Embedding),
                _num_rows(module),
            )
        )
    widths = Counter(p.shape[-1] for p in model.parameters() if p.dim() == 1)
    return Model(name, tuple(operators), widths.most_common(1)[0][0] if widths else 1, seq)


class Stopwatch:
    """Times each module of a real model, from its begin to that of the next: what lies between is the first one's."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.backward: defaultdict[str, float] = defaultdict(float)
        self._current: tuple[dict[str, float], str, float] | None = None
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._starter(self.forward, name)))
            if module._parameters:
                self._handles.append(module.register_forward_hook(self._follower(name)))

    def _starter(self, phase: dict[str, float], name: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            self.stop()
            self._current = (phase, name, time.perf_counter())

        return start

    def _follower(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """A module's backward begins when the gradient of its output is there."""

        def follow(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(self._starter(self.backward, name))

        return follow

    def stop(self) -> None:
        """Nothing runs now that counts."""
        if self._current is not None:
            phase, name, since = self._current
            phase[name] += time.perf_counter() - since
            self._current = None

    def take(self) -> dict[str, tuple[float, float]]:
        """Forward and backward seconds of each module since the last time."""
        self.stop()
        names = {*self.forward, *self.backward}
        seconds = {name: (self.forward[name], self.backward[name]) for name in names}
        self.forward.clear()
        self.backward.clear()
        return seconds


class _Watch:
    """Which modules run, in their order, with their parameters and what is saved meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self.order: list[str] = []
        self.parameters: dict[str, int] = {}
        self.units: dict[str, str] = {}
        self.saved_bytes: Counter[str] = Counter()
        self.widths: Counter[int] = Counter()  # elements that blocks hand on
        self._stack: list[str] = [""]
        self._storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._owners: dict[int, str] = {}
        self._seen: set[int] = set()
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving(name), always_call=True))

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(name)
            if name in self.parameters:
                return
            own = list(module.parameters(recurse=False))
            self.order.append(name)
            self.parameters[name] = sum(parameter.numel() for parameter in own)
            self.units[name] = self._owners.setdefault(id(own[0]), name) if own else name

        return enter

    def _leaving(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._stack.pop()
            if name and isinstance(output, torch.Tensor):
                self.widths[output.numel()] += 1

        return leave

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps this: count it, unless it is a parameter or was counted before."""
        storage = tensor.untyped_storage()._cdata
        if storage not in self._storages and storage not in self._seen:
            self._seen.add(storage)
            self.saved_bytes[self._stack[-1]] += tensor.numel() * tensor.element_size()
        return tensor

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _own_flops(counter: FlopCounterMode, model: nn.Module) -> dict[str, float]:
    """Operations of each module without those of its children."""
    total = {key: float(sum(values.values())) for key, values in counter.get_flop_counts().items()}
    root = type(model).__name__
    by_name = {_module_name(key, root): value for key, value in total.items() if key != _ROOT}
    own = dict(by_name)
    for name, value in by_name.items():
        parent = name.rpartition(".")[0] if name else None
        while parent is not None and parent not in by_name and parent:
            parent = parent.rpartition(".")[0]
        if parent is not None and parent in own and parent != name:
            own[parent] -= value
    return {name: max(0.0, value) for name, value in own.items()}


def _num_rows(module: nn.Module) -> int:
    """Of a weight that the engine can use in tiles (`runtime/tiles.py` has the conditions in full)."""
    if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
        return int(module.get_parameter("weight").shape[0])
    return 0


def _module_name(key: str, root: str) -> str:
    """The counter writes "GPT.blocks.0.up" for the module "blocks.0.up" of a GPT."""
    return key.removeprefix(root).lstrip(".")


def _blocks(model: nn.Module) -> dict[str, int]:
    """The block that each module belongs to: an entry of the longest list of modules."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return {}
    list_name, longest = max(lists, key=lambda pair: len(pair[1]))
    blocks: dict[str, int] = {}
    for number, block in enumerate(longest):
        prefix = f"{list_name}.{number}" if list_name else str(number)
        for name, _ in block.named_modules():
            blocks[f"{prefix}.{name}" if name else prefix] = number
    return blocks


def _hidden(watch: _Watch, tokens: int) -> int:
    """Elements a token that go from module to module: what most modules hand on."""
    if not watch.widths:
        return 1
    width, _ = watch.widths.most_common(1)[0]
    return max(1, math.ceil(width / tokens))
