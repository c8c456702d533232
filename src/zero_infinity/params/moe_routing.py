"""Detects layers that ranks call differently (experts, task heads) and makes ranks gather them together.

Ranks that store shards must gather the same layers and reduce the same gradients in the same order. All ranks call a
decoder's layers alike; if one rank skips one, that is a user error and is reported. Experts are called as the data
requires. Both look the same: a ModuleList of one class. Their inputs distinguish them: a layer gets the output of the
layer before it, an expert gets the same input as all experts.

So the first forward is observed. A container of siblings is a *chain* if the input of one was computed from the output
of the one before it. It holds *alternatives* if that never happened and inputs came from elsewhere or some siblings
were not called. Autograd's nodes are numbered in creation order, so only the few nodes newer than the earlier sibling's
output have to be searched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_infinity._torch import sequence_number, tree_leaves
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import LAYERS
from zero_infinity.params.uncopied_hook import Hook
from zero_infinity.params.unit import ManagedParameter, Unit

_CHAIN, _APART = 1, 2  # what was observed of a container


class ExpertContainer:
    """Siblings of one class, and what was observed of them so far."""

    def __init__(self, name: str, siblings: list[nn.Module], units: list[Unit]) -> None:
        self.name = name
        self.siblings = siblings
        self.units = units
        self.evidence = 0
        self._called: set[nn.Module] = set()
        self._made_last: frozenset[int] = frozenset()  # nodes of the last sibling's outputs

    def enter(self) -> None:
        """The container's owner is called."""
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
    """Observes a model's containers until they are classified."""

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
        """Observe from the next forward on."""
        for owner, container in self._owners:
            self._watch(owner, container)

    def evidence(self) -> list[int]:
        return [container.evidence for container in self.containers]

    def end(self, evidence: Collection[list[int]]) -> list[ExpertContainer]:
        """Stop observing; return the containers of alternatives, based on the evidence of all ranks."""
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
    """Makes ranks agree, at the first gradient, on the layers that each of them chooses from."""

    def __init__(self, watch: RoutingWatch, channel: Channel) -> None:
        self._watch = watch
        self._channel = channel
        self._is_known = False

    def start(self) -> None:
        """Observe from the next forward on."""
        self._watch.start()

    def classify(self) -> list[ExpertContainer]:
        """Return the containers of alternatives, agreed on by all ranks, at the first gradient; empty after that."""
        if self._is_known:
            return []
        self._is_known = True
        seen = self._channel.agree(LAYERS, self._watch.evidence())
        return self._watch.end(seen)


def _are_alike(siblings: list[nn.Module], owners: dict[nn.Module, list[ManagedParameter]]) -> bool:
    if len(siblings) < 2 or any(type(sibling) is not type(siblings[0]) for sibling in siblings):
        return False
    return all(any(module in owners for module in sibling.modules()) for sibling in siblings)


def _descends(nodes: Iterable[Any], ancestors: frozenset[int]) -> bool:
    """True if one of the nodes was computed from one of the ancestors (given by number)."""
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
