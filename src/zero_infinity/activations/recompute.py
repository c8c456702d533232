"""Activation checkpointing: blocks keep only their inputs and are recomputed in backward.

The model's code does not change: a block's `_call_impl`, which `nn.Module.__call__` looks up on the instance, is
replaced by one that calls the old one under torch's non-reentrant checkpoint. So the block's hooks, including the
engine's, run inside it, in forward and again in backward, and save the same tensors both times.

Handled here because torch's checkpoint leaves it to its caller:

- Non-tensor arguments are preserved as they were before the call: a list that the block appends to grows once, not
  twice.
- Buffers that a block changes in forward (the statistics of a batch norm) have their old values in the recomputation,
  and their new ones after it.
- For a key-value cache that is still empty (Hugging Face models create one even in training) a block gets a separate
  empty one each time: the recomputation would find the shared one filled, and that one would keep the keys and values
  of all blocks alive. A block that gets a filled cache (a prefix) is not recomputed.

A block is called normally in eval mode, without gradients, and where it is already being recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero_infinity._torch import (
    call_of,
    current_graph_task_id,
    own_buffers,
    replace_call,
    saved_tensor_hooks_allowed,
    tree_flatten,
    tree_unflatten,
)
from zero_infinity.activations.block_finder import Stack, find_stacks
from zero_infinity.config import Config
from zero_infinity.params.changing_buffers import BufferBefore, ChangingBuffers
from zero_infinity.params.dynamo import not_compiled
from zero_infinity.params.saved_tensors import SavedTensorHooks, outer_pack
from zero_infinity.params.uncopied_hook import Hook


def find_blocks(model: nn.Module, config: Config) -> Stack:
    """Return the blocks to recompute in backward: every k-th of each stack, starting with the first."""
    interval = int(config.checkpoint_activations)
    if not interval or _checkpoints_itself(model):
        return []
    stacks = find_stacks(model, config.checkpoint_modules)
    return [block for stack in stacks for block in stack[::interval] if not _calls_checkpoint(block)]


def attach(blocks: Stack, hooks: SavedTensorHooks | None = None) -> None:
    """Recompute these blocks in backward from now on; `hooks` keep their inputs."""
    for block in blocks:
        replace_call(block, Recomputed(block, hooks))


class Recomputed(Hook):
    """Calls a block so that it is recomputed in backward. A copy of the block is a plain one."""

    def __init__(self, block: nn.Module, hooks: SavedTensorHooks | None) -> None:
        self._block = block
        self._hooks = hooks
        self._call = call_of(block)
        self._buffers = ChangingBuffers(block)

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._block.training or not _may_checkpoint():
            return self._call(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        caches = [leaf for leaf in leaves if _is_cache(leaf)]
        if any(cache.get_seq_length() for cache in caches):
            return self._call(*args, **kwargs)
        if caches:
            leaves = [_copy_of_cache(leaf) if _is_cache(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(map(_fresh, leaves), structure)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        buffers = self._buffers.before()
        first = [(args, kwargs)]

        def run(*tensors: torch.Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                return self._call(*args, **kwargs)
            kept = iter(tensors)
            args, kwargs = tree_unflatten([next(kept) if o is _TENSOR else _fresh(o) for o in others], structure)
            with _with_buffers(buffers):
                return self._call(*args, **kwargs)

        del args, kwargs, leaves
        # The checkpoint saves its inputs under the surrounding hooks, and everything else under its own.
        with self._hooks.keeping_inputs() if self._hooks is not None else nullcontext():
            result = checkpoint(run, *tensors, use_reentrant=False)
        self._buffers.after(buffers)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._call,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._call, memo)


_TENSOR = object()  # placeholder for a tensor


@contextmanager
def _with_buffers(buffers: list[BufferBefore]) -> Iterator[None]:
    """Inside, modules have copies of their buffers' earlier values."""
    now = [own_buffers(b.owner).get(b.name) for b in buffers]
    for b in buffers:
        own_buffers(b.owner)[b.name] = b.before.clone()
    try:
        yield
    finally:
        for b, buffer in zip(buffers, now, strict=True):
            own_buffers(b.owner)[b.name] = buffer


def _itself(value: Any) -> Any:
    return value


def _may_checkpoint() -> bool:
    """True if autograd needs what a forward saves and the forward is not already checkpointed."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    # A forward inside a backward is a recomputation.
    if current_graph_task_id() != -1:
        return False
    # torch.func forbids saved-tensor hooks, on which the checkpoint is built.
    if not saved_tensor_hooks_allowed():
        return False
    return getattr(outer_pack(), "__module__", None) != checkpoint.__module__


def _is_cache(value: object) -> bool:
    """True for a key-value cache as transformers models pass it from block to block."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update") and not isinstance(value, nn.Module)


def _fresh(value: Any) -> Any:
    return _copy_of_cache(value) if _is_cache(value) else value


def _copy_of_cache(cache: Any) -> Any:
    """Return a copy with the same tensors: other blocks may have added some."""
    return copy.deepcopy(cache, {id(tensor): tensor for tensor in _tensors_in(cache, set())})


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for item in (*items, *getattr(value, "__dict__", {}).values()):
            yield from _tensors_in(item, seen)


def _checkpoints_itself(model: nn.Module) -> bool:
    """True if transformers' `gradient_checkpointing_enable()` was called, or a similar switch of the model is on."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _calls_checkpoint(block: nn.Module) -> bool:
    """Return True if a forward in the block calls `checkpoint`, unless a switch of its module turns it off.

    Only a simple check. A checkpoint inside ours is also correct; it just computes once more than necessary.
    """
    for module in block.modules():
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and "checkpoint" in code.co_names:
            switches = [value for name, value in vars(module).items() if "checkpoint" in name]
            if not switches or any(switches):
                return True
    return False
