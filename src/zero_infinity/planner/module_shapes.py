"""Describes any `nn.Module` to the planner by running it once on tensors without memory (meta or fake).

The only file of the planner that imports torch. torch's counter counts operations and autograd's hooks count saved
values, both for the module that is running; nothing is guessed from names. Which modules are repeated blocks is passed
in.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zero_infinity._torch import flops_by_operator, storage_id
from zero_infinity.errors import ConfigError
from zero_infinity.planner.model_shapes import OUTSIDE, ModelShape, OperatorShape
from zero_infinity.planner.unit_states import frozen

_ROOT = "Global"  # how the counter calls everything
_HALF_BYTES = 2


def _attention_flops(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    """Queries by keys, and weights by values; masked ones count, as in the papers."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _experts_flops(rows: _Shape, weights: _Shape, *_: Any, **__: Any) -> int:
    """Each row goes through one expert's weight."""
    return 2 * math.prod(rows) * weights[-1]


_Shape = Sequence[int]
# Operations that torch's counter does not know (2.13): attention as the CPU does it, and experts.
_UNCOUNTED = flops_by_operator(_attention_flops, _experts_flops)


def describe(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    batch: int,
    seq: int,
    name: str,
    dtype_bytes: int = _HALF_BYTES,
    blocks: Sequence[nn.Module] = (),
) -> ModelShape:
    """Run `model(**inputs)`, both without memory, and record what each module does, in order.

    `dtype_bytes`: what an element of activations takes in this run. What is saved in another dtype counts in bytes.
    `blocks`: modules that can be computed again in backward, in their order.
    """
    owners = _Owners(model)
    watch = _Watch(model, blocks, owners.unit_of, dtype_bytes)
    counter = FlopCounterMode(display=False, custom_mapping=_UNCOUNTED)
    with ExitStack() as stack:
        stack.callback(watch.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.saved, lambda tensor: tensor))
        stack.enter_context(counter)
        model(**inputs)
    flops = _own_flops(counter, model)
    tokens = batch * seq
    numbers = _block_numbers(model, blocks)
    operators: list[OperatorShape] = []
    for module in _with_idle(watch.order, owners.units):
        saved = watch.saved_elements[module] / tokens
        own_dtype = watch.saved_bytes[module] / tokens
        block = numbers.get(module, OUTSIDE)
        first, *others = owners.operators(module, flops.get(module, 0.0) / tokens, saved, block, watch.needed)
        operators += [replace(first, saved_bytes_per_token=own_dtype), *others]
    if not owners.units:
        raise ConfigError(f"{name}: the model has no parameters")
    return ModelShape(name, tuple(operators), watch.hidden(tokens), seq, watch.largest_bytes / tokens)


def outline(
    model: nn.Module, *, seq: int, name: str, blocks: Sequence[nn.Module] = (), part_of_experts: float = 1.0
) -> ModelShape:
    """A model that is not run: modules in the order of registration, two operations per weight.

    For models whose forward depends on values, or whose inputs are unknown. A weight of three dimensions belongs to
    experts, of which each token uses the share `part_of_experts`.
    """
    owners = _Owners(model)
    if not owners.units:
        raise ConfigError(f"{name}: the model has no parameters")
    numbers = _block_numbers(model, blocks)
    operators: list[OperatorShape] = []
    for module_name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        weights = [] if isinstance(module, nn.Embedding) else [p for p in own if p.dim() > 1]
        flops = sum(2.0 * p.numel() * (part_of_experts if p.dim() == 3 else 1.0) for p in weights)
        saved = float(sum(sum(weight.shape[-2:]) for weight in weights))
        operators += owners.operators(module_name, flops, saved, numbers.get(module_name, OUTSIDE), None)
    widths = Counter(p.shape[-1] for p in model.parameters() if p.dim() == 1)
    return ModelShape(name, tuple(operators), widths.most_common(1)[0][0] if widths else 1, seq)


class _Owners:
    """Units as the engine makes them: a module's own parameters, each at the first module that has it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owner: dict[int, str] = {}
        self.units: dict[str, int] = {}  # parameters by unit
        self._trained: Counter[str] = Counter()  # elements of those that get gradients, by unit
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in self._owner:
                    self._owner[id(parameter)] = name
                    self.units[name] = self.units.get(name, 0) + parameter.numel()
                    self._trained[name] += parameter.numel() if parameter.requires_grad else 0

    def unit_of(self, parameter: nn.Parameter) -> str:
        return self._owner[id(parameter)]

    def operators(
        self, name: str, flops: float, saved: float, block: int, needed: Callable[[str, str], bool] | None
    ) -> list[OperatorShape]:
        """What a module does, with the unit of its largest parameter; then its other units: a tied head's own bias.

        `needed(module, unit)`: what backward of this module needs. None: nobody has seen it run.
        """
        module = self._model.get_submodule(name)
        own = sorted(module.parameters(recurse=False), key=lambda parameter: -parameter.numel())
        units = list(dict.fromkeys(self._owner[id(parameter)] for parameter in own))
        if not units:
            return [OperatorShape(name, 0, flops, saved, block)]
        in_backward = [not isinstance(module, nn.Embedding) if needed is None else needed(name, unit) for unit in units]
        first, *others = units
        operators = [
            OperatorShape(name, self.units[first], flops, saved, block, first, in_backward[0], _num_rows(module)),
            *(
                OperatorShape(f"{name} ({other})", self.units[other], 0.0, 0.0, block, other, is_needed)
                for other, is_needed in zip(others, in_backward[1:], strict=True)
            ),
        ]
        return [operator if self._trained[operator.unit] else _frozen(operator, own) for operator in operators]


def _frozen(operator: OperatorShape, own: Sequence[nn.Parameter]) -> OperatorShape:
    """An operator whose weight gets no gradient: backward computes that of its input, if somebody wants it."""
    states = frozen(own[0].element_size())
    return replace(operator, states=states, num_backward=1.0 if operator.weight_in_backward else 0.0)


def _with_idle(order: list[str], units: Iterable[str]) -> list[str]:
    """Modules that ran, each followed by those inside of it that never did and have parameters all the same.

    Somebody else may use these parameters directly; if nobody does, they have states to keep anyway.
    """
    ran = set(order)
    idle: defaultdict[str, list[str]] = defaultdict(list)
    for name in units:
        if name not in ran:
            idle[_enclosing(name, ran) or ""].append(name)
    return [name for module in order for name in (module, *idle[module])]


class _Watch:
    """Which modules run, in their order, what is saved meanwhile, and what blocks are given."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        unit_of: Callable[[nn.Parameter], str],
        dtype_bytes: int,
    ) -> None:
        self.order: list[str] = []
        self.saved_elements: Counter[str] = Counter()
        self.saved_bytes: Counter[str] = Counter()  # in another dtype
        self.largest_bytes = 0  # of what is saved outside of blocks
        self._dtype_bytes = dtype_bytes
        self._blocks = {name for name, module in model.named_modules() if module in {*blocks}}
        self._widths: Counter[int] = Counter()  # elements that modules hand on
        self._inputs: list[int] = []  # elements of each block's input
        self._stack: list[str] = [""]
        self._entered: set[str] = set()
        self._units = {storage_id(p.untyped_storage()): unit_of(p) for p in model.parameters()}
        self._needed: set[tuple[str, str]] = set()
        self._seen: set[int] = set()
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving(name), always_call=True))
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(self._given, with_kwargs=True))

    def _entering(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(_: nn.Module, __: Any) -> None:
            self._stack.append(name)
            if name not in self._entered:
                self._entered.add(name)
                self.order.append(name)

        return enter

    def _leaving(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._stack.pop()
            if name and isinstance(output, torch.Tensor):
                self._widths[output.numel()] += 1

        return leave

    def _given(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        self._inputs += [tensor.numel() for tensor in tensors][:1]

    def hidden(self, tokens: int) -> int:
        """Elements a token that go from block to block, on average; without blocks what most modules hand on."""
        if self._inputs:
            return max(1, math.ceil(sum(self._inputs) / len(self._inputs) / tokens))
        return max(1, math.ceil(self._widths.most_common(1)[0][0] / tokens)) if self._widths else 1

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps this: count it, unless it is a parameter or was counted before."""
        storage = storage_id(tensor.untyped_storage())
        if storage in self._units:
            self._needed.add((self._stack[-1], self._units[storage]))
        elif storage not in self._seen:
            self._seen.add(storage)
            if tensor.element_size() == self._dtype_bytes:
                self.saved_elements[self._stack[-1]] += tensor.numel()
            else:
                self.saved_bytes[self._stack[-1]] += tensor.nbytes
            if tensor.is_floating_point() and self._blocks.isdisjoint(self._stack):
                self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        return tensor

    def needed(self, module: str, unit: str) -> bool:
        """True if backward of this module, or of the one that uses its parameters, needs the unit's values."""
        by_itself = (module, unit) in self._needed
        return by_itself or (module not in self._entered and any(unit == other for _, other in self._needed))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _own_flops(counter: FlopCounterMode, model: nn.Module) -> dict[str, float]:
    """Operations of each module without those of its children."""
    total = {key: float(sum(values.values())) for key, values in counter.get_flop_counts().items()}
    root = type(model).__name__
    # The counter writes "GPT.blocks.0.up" for the module "blocks.0.up" of a GPT.
    by_name = {key.removeprefix(root).lstrip("."): value for key, value in total.items() if key != _ROOT}
    own = dict(by_name)
    for name, value in by_name.items():
        parent = _enclosing(name, by_name)
        if parent is not None:
            own[parent] -= value
    return {name: max(0.0, value) for name, value in own.items()}


def _num_rows(module: nn.Module) -> int:
    """Of a weight that the engine can use in tiles (`tiling/tile_plan.py` has the conditions in full)."""
    if isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == "Conv1D":
        return int(module.get_parameter("weight").shape[0])
    return 0


def _enclosing(name: str, among: Container[str]) -> str | None:
    """The nearest of these modules that `name` is inside of."""
    while name:
        name = name.rpartition(".")[0]
        if name in among:
            return name
    return None


def _block_numbers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """The block that each module belongs to."""
    inside = {module: number for number, block in enumerate(blocks) for module in block.modules()}
    return {name: inside[module] for name, module in model.named_modules() if module in inside}
