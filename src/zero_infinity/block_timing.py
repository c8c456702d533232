"""Times one block of a model on this machine's CPU, for plans that rest on a measurement of the model itself.

Owns the way from a model without memory to one real block with the inputs that it is called with. The rest of the model
never gets memory, so a model of any size can be timed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_infinity._torch import tree_leaves, tree_map
from zero_infinity.errors import UsageError

_MAX_ROUNDS = 5
_MAX_SECONDS = 40.0
_SPREAD = 0.02  # of random weights and inputs: small, so that nothing overflows


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A block, and what it is called with; without memory."""

    block: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of one block for one micro-batch."""

    forward: float
    backward: float


class _ReachedError(Exception):
    """The block was called: nothing more is needed."""


def find_call(model: nn.Module, block: nn.Module, inputs: Mapping[str, Any]) -> BlockCall:
    """Run the model, without memory, until it calls the block."""
    found: list[BlockCall] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append(BlockCall(block, arguments, keywords))
        raise _ReachedError

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(**inputs)
    except _ReachedError:
        return found[0]
    finally:
        handle.remove()
    raise UsageError(f"{type(model).__name__} does not call its {type(block).__name__}: it cannot be timed")


def time_block(call: BlockCall, *, num_copies: int = 1) -> BlockTimes:
    """Give the block memory and run it forward and backward. `num_copies`: of its first input, along the batch."""
    with _same_random_numbers():
        return _time(call, num_copies)


def _time(call: BlockCall, num_copies: int) -> BlockTimes:
    block = _with_memory(call.block)
    arguments, keywords = tree_map(_real, (call.arguments, dict(call.keywords)))
    first = next(value for value in tree_leaves((arguments, keywords)) if isinstance(value, torch.Tensor))
    hidden = torch.cat([first] * num_copies).requires_grad_(True)
    arguments, keywords = tree_map(lambda value: hidden if value is first else value, (arguments, keywords))
    forward, backward = [], []
    give_up = time.perf_counter() + _MAX_SECONDS
    for _ in range(_MAX_ROUNDS + 1):  # the first sets up threads and memory
        start = time.perf_counter()
        output = block(*arguments, **keywords)
        middle = time.perf_counter()
        _sum(output).backward()
        backward.append(time.perf_counter() - middle)
        forward.append(middle - start)
        if time.perf_counter() > give_up:
            break
    return BlockTimes(min(forward), min(backward))


def _sum(output: Any) -> torch.Tensor:
    """A gradient for whatever the block returns."""
    tensors = [v for v in tree_leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def _with_memory(block: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in block.parameters():
        memo[id(parameter)] = nn.Parameter(_real(parameter), requires_grad=parameter.requires_grad)
    for buffer in block.buffers():
        memo[id(buffer)] = _real(buffer)
    return copy.deepcopy(block, memo)


def _real(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype).normal_(0.0, _SPREAD)
    return (
        torch.ones(value.shape, dtype=value.dtype)
        if value.dtype == torch.bool
        else torch.zeros(value.shape, dtype=value.dtype)
    )


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Timing does not change what the script draws next."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
