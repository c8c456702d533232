"""The comparison finds what it is there to find: each fault that is put into the engine makes it fail.

A fault is small and silent, as a real bug would be: one byte string that is not written, one buffer that is handed on too
early, one gradient that is lost. If a rewrite of the engine makes a mutation impossible to apply, replace it by its like.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.compare import FITS, HALF, MINIMAL, Divergence, Run, Script, Setting, adamw, compare, training
from support.models import mean_square, mlp, vectors
from torch import nn

from zero_infinity.optim import update_submission as submission_module
from zero_infinity.optim.chunk_update import UnitUpdate
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.params.unit import Unit
from zero_infinity.params.unit_access import UnitAccess
from zero_infinity.policy.cache_policy import CachePolicy
from zero_infinity.storage.block_io import BlockIO
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_types import Direction

Mutation = Callable[[], AbstractContextManager[Any]]

batch = vectors()
usual = training(batch, mean_square)


def small() -> nn.Module:
    return mlp(depth=3).eval()


class Counter:
    """Counts calls, so that a fault can happen once, in the middle of training."""

    def __init__(self, when: int) -> None:
        self.when = when
        self.count = 0

    def is_due(self) -> bool:
        self.count += 1
        return self.count == self.when


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """A method replaced by what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


# ---------------------------------------------------------------------- faults


def skips_a_write_back() -> AbstractContextManager[Any]:
    """(a) A dirty block is taken to be clean, and what was written to it is lost."""
    due = Counter(25)

    def make(submit: Any) -> Any:
        def faulty(self: BlockIO, block: Any, direction: Any, memory: Any, priority: Any, done: Any) -> None:
            if direction is Direction.WRITE and due.is_due():
                # Read instead of written: the home keeps what it had, and so does whoever looks there next.
                direction, memory = Direction.READ, _scratch(memory)
            submit(self, block, direction, memory, priority, done)

        return faulty

    return replaced(BlockIO, "submit", make)


def _scratch(memory: memoryview) -> memoryview:
    """Aligned memory of the same size, for direct I/O."""
    pages = mmap.mmap(-1, len(memory))
    return memoryview(pages)


def reads_another_block() -> AbstractContextManager[Any]:
    """(d) A prefetch brings the bytes of another block of the same size."""
    due = Counter(12)
    last: dict[int, Any] = {}

    def make(submit: Any) -> Any:
        def faulty(self: BlockIO, block: Any, direction: Any, memory: Any, priority: Any, done: Any) -> None:
            other = last.get(block.num_bytes)
            if direction is Direction.READ:
                last[block.num_bytes] = block
                if other is not None and other is not block and due.is_due():
                    right, block.offset = block.offset, other.offset
                    submit(self, block, direction, memory, priority, done)
                    block.offset = right
                    return
            submit(self, block, direction, memory, priority, done)

        return faulty

    return replaced(BlockIO, "submit", make)


def reuses_buffers_that_are_referenced() -> AbstractContextManager[Any]:
    """(b) A tensor over a buffer does not keep it: it is handed on while autograd still reads it."""
    return mock.patch.object(BufferPool, "add_lease", lambda self, buffer, storage: None)


def drops_a_gradient() -> AbstractContextManager[Any]:
    """(c) One parameter's gradient is lost once."""
    due = Counter(9)

    def make(take: Any) -> Any:
        def faulty(self: GradientFlow, parameter: Any, gradient: torch.Tensor) -> None:
            if not due.is_due():
                take(self, parameter, gradient)

        return faulty

    return replaced(GradientFlow, "take", make)


def forgets_what_was_accumulated() -> AbstractContextManager[Any]:
    """The second gradient of a step replaces the first."""

    def make(retain: Any) -> Any:
        def faulty(self: GradientFlow, parameter: Any, flat: torch.Tensor) -> None:
            self._retained.release([parameter])
            retain(self, parameter, flat)

        return faulty

    return replaced(GradientFlow, "_retain", make)


def keeps_the_first_settings() -> AbstractContextManager[Any]:
    """The learning rate of the first step is used for ever."""
    first: dict[str, Any] = {}

    def faulty(group: dict[str, Any]) -> dict[str, Any]:
        if not first:
            first.update({name: value for name, value in group.items() if name != "params"})
        return first

    return mock.patch.object(submission_module, "hyperparameters_of", faulty)


def skips_a_chunk() -> AbstractContextManager[Any]:
    """One chunk of one unit is not updated, once."""
    due = Counter(15)

    def make(update: Any) -> Any:
        def faulty(self: UnitUpdate, segment: Any, chunk: Any, values: Any, states: Any, gradient: Any) -> Any:
            if due.is_due():
                values = values.clone()
            return update(self, segment, chunk, values, states, gradient)

        return faulty

    return replaced(UnitUpdate, "_update_segment", make)


def loses_edits() -> AbstractContextManager[Any]:
    """What the user writes to a parameter is not taken to be newer than what is stored."""
    return mock.patch.object(UnitAccess, "keep", lambda self, parameter: None)


def updates_under_saved_values() -> AbstractContextManager[Any]:
    """An early update does not look whether somebody still holds the old value."""

    @contextmanager
    def mutated() -> Iterator[None]:
        with (
            mock.patch.object(Unit, "is_saved", property(lambda _: False)),
            mock.patch("zero_infinity.params.unit_values.HostValues.aliased", lambda *_: False),
        ):
            yield

    return mutated()


# ---------------------------------------------------------------------- scripts that meet them


def accumulating(run: Run) -> None:
    for number in range(4):
        for part in range(2):
            loss = mean_square(run.model, batch(2 * number + part))
            loss.backward()
            run.log(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


def scheduled(run: Run) -> None:
    for number in range(5):
        loss = mean_square(run.model, batch(number))
        loss.backward()
        run.optimizer.step()
        for group in run.optimizer.param_groups:
            group["lr"] = 0.02 * number
        run.optimizer.zero_grad()
        run.log(loss)


def editing(run: Run) -> None:
    for number in range(4):
        with torch.no_grad():
            run.model[0].weight.mul_(0.5)
        run.step(mean_square(run.model, batch(number)))


def holding(run: Run) -> None:
    for number in range(4):
        kept = run.model[0].weight.detach()
        loss = mean_square(run.model, batch(number)) * kept.abs().sum()
        run.log(kept)
        run.step(loss)
        del kept, loss


def detaching(run: Run) -> None:
    for number in range(5):
        hidden = run.model[0](batch(number)) @ run.model[9].weight.detach()
        run.step(run.model[9](hidden).square().mean())


# How much memory a script has: with plenty, an early update runs at once.
SETTINGS: dict[Script, Setting] = {detaching: FITS}

FAULTS: list[tuple[Mutation, Script]] = [
    (skips_a_write_back, usual),
    (reads_another_block, usual),
    (reuses_buffers_that_are_referenced, holding),
    (drops_a_gradient, usual),
    (forgets_what_was_accumulated, accumulating),
    (keeps_the_first_settings, scheduled),
    (skips_a_chunk, usual),
    (loses_edits, editing),
    (updates_under_saved_values, detaching),
]


@pytest.mark.parametrize(("mutation", "script"), FAULTS, ids=[mutation.__name__ for mutation, _ in FAULTS])
def test_a_fault_is_found(mutation: Mutation, script: Script, tmp_path: Path) -> None:
    with mutation(), pytest.raises(Divergence):
        compare(small, script, adamw, SETTINGS.get(script, MINIMAL), tmp_path)


@pytest.mark.parametrize("script", [usual, accumulating, scheduled, editing, holding, detaching])
def test_without_a_fault_nothing_is_found(script: Script, tmp_path: Path) -> None:
    # What `holding` holds needs room of its own, unless it is handed on while it is held.
    setting = HALF if script is holding else SETTINGS.get(script, MINIMAL)
    compare(small, script, adamw, setting, tmp_path)


def test_a_policy_that_evicts_at_random_changes_no_number(tmp_path: Path) -> None:
    """Which block leaves is a matter of speed alone: correctness does not rest on the policy's foresight."""
    state = torch.Generator().manual_seed(0)

    def make(rank: Any) -> Any:
        def shuffled(self: CachePolicy, block: int) -> None:
            rank(self, block)
            # A wrong next use in the heap is a stale entry at worst; a wrong one in both places is a wrong decision.
            wrong = int(torch.randint(0, 1000, (), generator=state))
            self._next_use[block] = wrong
            self._farthest.append((-wrong, block))
            self._farthest.sort()

        return shuffled

    with replaced(CachePolicy, "_rank", make):
        compare(small, usual, adamw, HALF, tmp_path)
