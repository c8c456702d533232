"""Runs the forwards of all micro-batches through one block before the next.

Each forward is a coroutine that pauses where it enters a block, and where it leaves the last one of a stack. They go on
in turn, so that a block's parameters are read once for all micro-batches, and each module sees them in their order. The
model's code is not changed: a block's `_call_impl`, which `nn.Module.__call__` looks up on the instance, is replaced
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_infinity._torch import call_of, current_graph_task_id, own_call, replace_call, reset_call, version_of
from zero_infinity.accumulation.coroutine import Coroutine
from zero_infinity.accumulation.cut_graph import CannotCutError, CutGraph
from zero_infinity.accumulation.random_states import RandomState, random_state
from zero_infinity.activations.block_finder import Stack
from zero_infinity.params.dynamo import not_compiled
from zero_infinity.params.module_hooks import ForwardEntry, ForwardStack
from zero_infinity.params.uncopied_hook import Hook


class MicroBatch:
    """One forward that pauses at blocks."""

    def __init__(self, forward: Callable[[], torch.Tensor], forwards: ForwardStack, state: RandomState) -> None:
        self.graph = CutGraph()
        self.begin = self.now = state  # random states
        self.places: list[int] = []  # where it has paused
        self._forwards = forwards
        self._entries: list[ForwardEntry] = []
        self._outer: list[ForwardEntry] = []
        self._coroutine = Coroutine(lambda: self._run(forward), "micro-batch")

    @property
    def has_ended(self) -> bool:
        return self._coroutine.has_ended

    def take_loss(self) -> torch.Tensor:
        """Return the result of the forward, which has ended. It is not kept here."""
        loss, self._coroutine.result = self._coroutine.result, None
        if loss is None:
            raise RuntimeError("the forward of a micro-batch has not ended")
        return loss

    def resume(self) -> None:
        """Go on to the next block, with the random state where it has paused."""
        self.now.put_back()
        try:
            self._coroutine.resume()
        finally:
            self._forwards.go_on_here()
        self.now = random_state(self.begin.device)

    def pause(self, place: int) -> None:
        """Called in it: let the other micro-batches run."""
        self.places.append(place)
        self._leave()
        try:
            self._coroutine.pause()
        finally:
            self._enter()
        self.graph.begin_piece()

    def cancel(self) -> None:
        """End it where it has paused."""
        self._coroutine.cancel()
        self._forwards.go_on_here()

    def _run(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._enter()
        try:
            return forward()
        finally:
            self._leave()

    def _enter(self) -> None:
        self._outer = self._forwards.exchange(self._entries)

    def _leave(self) -> None:
        self._entries = self._forwards.exchange(self._outer)


class Turns:
    """The micro-batches that run, and the one whose turn it is."""

    def __init__(self) -> None:
        self.current: MicroBatch | None = None

    def run(self, micro_batches: Sequence[MicroBatch], ended: Callable[[MicroBatch], None]) -> None:
        """Run them block by block to their ends; `ended` is called at each end."""
        running = list(micro_batches)
        try:
            while running:
                for micro_batch in running:
                    self.current = micro_batch
                    micro_batch.resume()
                    self.current = None
                    if micro_batch.has_ended:
                        ended(micro_batch)
                running = [micro_batch for micro_batch in running if not micro_batch.has_ended]
        except BaseException:
            for micro_batch in running:
                self.current = micro_batch
                micro_batch.cancel()
            raise
        finally:
            self.current = None


class PausingBlock(Hook):
    """Calls a block of which all micro-batches have computed the one before."""

    def __init__(self, block: nn.Module, place: int, turns: Turns, *, is_last: bool) -> None:
        self._call = call_of(block)
        self._place = place
        self._turns = turns
        self._is_last = is_last

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        micro_batch = self._turns.current
        if micro_batch is None or current_graph_task_id() >= 0:  # it is recomputed in backward
            return self._call(*args, **kwargs)
        micro_batch.pause(self._place)
        args, kwargs = micro_batch.graph.cut((args, kwargs))
        versions = micro_batch.graph.versions()
        result = self._call(*args, **kwargs)
        if any(version_of(tensor) != version for tensor, version in versions):
            raise CannotCutError("a block changes its input in place")
        del args, kwargs, versions
        if self._is_last:
            micro_batch.pause(~self._place)
            result = micro_batch.graph.cut(result)
        return result


@contextmanager
def pausing(stacks: Sequence[Stack], turns: Turns) -> Iterator[None]:
    """Inside, micro-batches pause at these blocks."""
    blocks = [(block, block is stack[-1]) for stack in stacks for block in stack]
    before = [own_call(block) for block, _ in blocks]
    for place, (block, is_last) in enumerate(blocks):
        replace_call(block, PausingBlock(block, place, turns, is_last=is_last))
    try:
        yield
    finally:
        for (block, _), call in zip(blocks, before, strict=True):
            reset_call(block, call)
