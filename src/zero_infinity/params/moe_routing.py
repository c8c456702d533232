"""Layers of which each rank may call others: experts that a router chooses from, heads for different tasks.

Ranks that store parts of every layer have to gather the same layers in the same order, and to sum the same gradients.
A decoder's layers are called by all ranks alike; when one rank leaves one out, that is a mistake, and is said. Experts
are called as the data wants. Both look the same: a ModuleList of one class. What tells them apart is what they are
given: a layer gets what the layer before it made, an expert gets what all experts get.

So the first forward is watched. A container of siblings is a *chain* when one's input was computed from the output of
the one before it; it holds *alternatives* when that was never so and inputs came from elsewhere or some had no call.
Autograd's nodes are numbered in the order in which they were made, so the question is answered by looking at the few
nodes that are younger than the earlier sibling's output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_infinity._torch import sequence_number, tree_leaves
from zero_infinity.comm.channel import Channel, Topic
from zero_infinity.params.module_hooks import Hook
from zero_infinity.params.unit import ManagedParameter, Unit

# The topic of what was seen; no unit has this number.
_LAYERS = -11
_CHAIN, _APART = 1, 2  # what was seen of a container


class ExpertContainer:
    """Siblings of one class, and what was seen of them so far."""

    def __init__(self, name: str, siblings: list[nn.Module], units: list[Unit]) -> None:
        self.name = name
        self.siblings = siblings
        self.units = units
        self.evidence = 0
        self._called: set[nn.Module] = set()
        self._made_last: frozenset[int] = frozenset()  # the nodes of the last sibling's outputs

    @property
    def may_be_chosen_from(self) -> bool:
        """Whether nothing says that all siblings are called one after the other."""
        return not self.evidence & _CHAIN

    def enter(self) -> None:
        """Its owner is called."""
        self._called.clear()
        self._made_last = frozenset()

    def leave(self) -> None:
        if self._called and len(self._called) < len(self.siblings):
            self.evidence |= _APART

    def call(self, sibling: nn.Module, inputs: Any) -> None:
        self._called.add(sibling)
        nodes = [leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if self._made_last and any(node is not None for node in nodes):
            self.evidence |= _CHAIN if _descends(nodes, self._made_last) else _APART

    def called(self, outputs: Any) -> None:
        made = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self._made_last = frozenset(sequence_number(node) for node in made if node is not None)


class _Enter(Hook):
    def __init__(self, container: ExpertContainer) -> None:
        self._container = container

    def __call__(self, *_: Any) -> None:
        self._container.enter()


class _Leave(_Enter):
    def __call__(self, *_: Any) -> None:
        self._container.leave()


class _Call(Hook):
    def __init__(self, container: ExpertContainer) -> None:
        self._container = container

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        self._container.call(module, (arguments, keywords))


class _Called(_Enter):
    def __call__(self, _: nn.Module, __: Any, outputs: Any) -> None:
        self._container.called(outputs)


class RoutingWatch:
    """Watches a model's containers until it is known what they are."""

    def __init__(self, model: nn.Module, owners: dict[nn.Module, list[ManagedParameter]]) -> None:
        self.containers: list[ExpertContainer] = []
        self._owners: list[tuple[nn.Module, ExpertContainer]] = []
        self._handles: list[RemovableHandle] = []
        for name, owner in model.named_modules():
            for attribute, child in owner.named_children():
                siblings = list(child.children())
                if isinstance(child, nn.ModuleList | nn.ModuleDict) and _are_alike(siblings, owners):
                    units = dict.fromkeys(
                        p.unit for sibling in siblings for m in sibling.modules() for p in owners.get(m, ())
                    )
                    container = ExpertContainer(f"{name}.{attribute}".lstrip("."), siblings, list(units))
                    self.containers.append(container)
                    self._owners.append((owner, container))

    def _watch(self, owner: nn.Module, container: ExpertContainer) -> None:
        self._handles += [
            owner.register_forward_pre_hook(_Enter(container)),
            owner.register_forward_hook(_Leave(container), always_call=True),
        ]
        for sibling in container.siblings:
            self._handles += [
                sibling.register_forward_pre_hook(_Call(container), with_kwargs=True, prepend=True),
                sibling.register_forward_hook(_Called(container)),
            ]

    def start(self) -> None:
        """Watch from the next forward on."""
        for owner, container in self._owners:
            self._watch(owner, container)

    def innermost(self, number: int) -> ExpertContainer | None:
        """The smallest container that the unit of this number lies in."""
        around = [container for container in self.containers if any(unit.number == number for unit in container.units)]
        return min(around, key=lambda container: len(container.units), default=None)

    def evidence(self) -> list[int]:
        return [container.evidence for container in self.containers]

    def end(self, evidence: Collection[list[int]]) -> list[ExpertContainer]:
        """Stop watching; the containers of alternatives, going by what all ranks have seen."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        found = []
        for number, container in enumerate(self.containers):
            for seen in evidence:
                container.evidence |= seen[number]
            if container.evidence == _APART:
                found.append(container)
        return found


class ExpertRouting:
    """What ranks do about layers that each of them chooses from: they agree on what was seen at the first gradient.

    Until then, ranks that ask for different units gather all of the container that these are in.
    """

    def __init__(self, watch: RoutingWatch, channel: Channel) -> None:
        self._watch = watch
        self._channel = channel
        self._is_known = False

    def start(self) -> None:
        """Watch from the next forward on."""
        self._watch.start()

    def chosen_from(self, number: int) -> tuple[str, Sequence[Unit]] | None:
        """The units among which this one may be a rank's choice, with their common name."""
        container = self._watch.innermost(number) if not self._is_known else None
        if container is None or not container.may_be_chosen_from:
            return None
        return container.name, container.units

    def classify(self) -> list[ExpertContainer]:
        """The containers of alternatives, agreed on by all ranks. Once, with the first gradient; empty afterwards."""
        if self._is_known:
            return []
        self._is_known = True
        seen = self._channel.agree(Topic("layers", _LAYERS, "the first gradient"), self._watch.evidence())
        return self._watch.end(seen)


def _are_alike(siblings: list[nn.Module], owners: dict[nn.Module, list[ManagedParameter]]) -> bool:
    if len(siblings) < 2 or any(type(sibling) is not type(siblings[0]) for sibling in siblings):
        return False
    return all(any(module in owners for module in sibling.modules()) for sibling in siblings)


def _descends(nodes: Iterable[Any], ancestors: frozenset[int]) -> bool:
    """Whether one of the nodes was computed from one of the ancestors (given by number)."""
    oldest = min(ancestors)
    left = [node for node in nodes if node is not None]
    seen: set[int] = set()
    while left:
        node = left.pop()
        number = sequence_number(node)
        if number in ancestors:
            return True
        if number < oldest or number in seen:
            continue
        seen.add(number)
        left += [parent for parent, _ in node.next_functions if parent is not None]
    return False
