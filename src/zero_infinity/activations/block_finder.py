"""Finds the repeated blocks of a model: the layers of a decoder, encoder or vision transformer.

The depth of a model is in a ModuleList or Sequential of one class. Only *outermost* ones count (the layers, not the
experts inside each), and only those with a large share of the parameters: both stacks of an encoder-decoder count, a
short list of adapters does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from zero_infinity.errors import UsageError

# A stack counts if it has at least this fraction of the largest stack's parameters.
_STACK_SHARE = 1 / 8
# Class names listed in a message.
_NUM_LISTED = 20

Stack = list[nn.Module]  # blocks in order


def find_stacks(model: nn.Module, class_names: Sequence[str] = ()) -> list[Stack]:
    """Return the stacks of blocks in a model: of these classes, or else found by their structure."""
    return _stacks_of(model, class_names) if class_names else _repeated(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return all blocks of a model in order, found by their structure; empty if it has none."""
    try:
        return [block for stack in find_stacks(model) for block in stack]
    except UsageError:
        return []


def _repeated(model: nn.Module) -> list[Stack]:
    found = dict(_containers(model))
    inner = {m for owner in found for m in owner.modules() if m is not owner}
    sizes = {owner: _num_elements(owner) for owner in found if owner not in inner}
    if not sizes:
        raise UsageError(
            f"checkpoint_activations: {type(model).__name__} has no repeated blocks (a ModuleList or Sequential of one "
            "class whose members have modules and parameters)\n"
            f"  fix:   checkpoint_modules= with one or more of {_listed(model)}"
        )
    largest = max(sizes.values())
    return [found[owner] for owner, size in sizes.items() if size >= largest * _STACK_SHARE]


def _containers(model: nn.Module) -> Iterator[tuple[nn.Module, Stack]]:
    for module in model.modules():
        # A block that is listed twice is one block that is called twice.
        members = list(dict.fromkeys(module.children()))
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1 and _are_blocks(members):
            yield module, members


def _are_blocks(members: Stack) -> bool:
    if any(type(member) is not type(members[0]) for member in members):
        return False
    return all(any(True for _ in m.children()) and any(True for _ in m.parameters()) for m in members)


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _stacks_of(model: nn.Module, class_names: Sequence[str]) -> list[Stack]:
    """Return the modules of each named class; a block inside another block is a part of it."""
    chosen = {m: name for m in model.modules() if (name := _match(m, class_names)) is not None and m is not model}
    missing = [name for name in class_names if name not in chosen.values()]
    if missing:
        raise UsageError(
            f"checkpoint_modules: {type(model).__name__} has no module of class {', '.join(map(repr, missing))}\n"
            f"  fix:   use one or more of {_listed(model)}"
        )
    inner = {m for block in chosen for m in block.modules() if m is not block}
    return [[m for m, found in chosen.items() if found == name and m not in inner] for name in class_names]


def _match(module: nn.Module, class_names: Sequence[str]) -> str | None:
    """Return the given name that matches this module's class or one of its base classes."""
    own = {name for kind in type(module).__mro__ if kind not in (nn.Module, object) for name in _names(kind)}
    return next((name for name in class_names if name in own), None)


def _names(kind: type) -> tuple[str, str]:
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _listed(model: nn.Module) -> str:
    """Return candidate classes, those with most modules first."""
    counts = Counter(type(m).__name__ for m in model.modules() if m is not model and any(True for _ in m.parameters()))
    names = [f"{name!r} ({count})" for name, count in counts.most_common(_NUM_LISTED)]
    return ", ".join(names) + (", ..." if len(counts) > _NUM_LISTED else "") if names else "none: it has no parameters"
