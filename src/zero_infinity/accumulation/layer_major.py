"""One step of layer-major accumulation: the forwards of all micro-batches, checked against what a loop would do.

What comes after the blocks (the head and the loss) is run forward and backward for one micro-batch before the next, if
nothing found later could be a reason to go back: its activations are large, and would be needed by all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from zero_infinity._torch import inside_dispatch_mode, tree_leaves
from zero_infinity.accumulation.cut_graph import CannotCutError
from zero_infinity.accumulation.forward_effects import Before
from zero_infinity.accumulation.job import AccumulationJob
from zero_infinity.accumulation.layer_major_backward import Keep, LayerMajorBackward
from zero_infinity.accumulation.layer_major_forward import MicroBatch, Turns, pausing
from zero_infinity.accumulation.random_states import (
    Distance,
    RandomState,
    are_same,
    other_generators,
    random_state,
)
from zero_infinity.activations.block_finder import Stack
from zero_infinity.errors import UsageError
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.scaled_backward import BackwardScaling
from zero_infinity.params.module_hooks import ForwardStack

Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that a step uses."""

    forwards: ForwardStack
    gradients: GradientFlow
    backward_scaling: BackwardScaling | None
    keep: Keep
    device: torch.device
    has_ranks: bool
    anywhere: Callable[[bool], bool]  # true on any rank?


@dataclass(slots=True)
class Experience:
    """What earlier steps have shown."""

    # How far a forward moves the generators, by the shapes of its micro-batch.
    moves: dict[Shapes, Distance] = field(default_factory=dict)
    is_proven: bool = False  # the losses are those of a loop


class LayerMajorStep:
    """Forward and backward of all micro-batches."""

    def __init__(self, job: AccumulationJob, stacks: Sequence[Stack], parts: Parts, experience: Experience) -> None:
        self._job = job
        self._stacks = stacks
        self._parts = parts
        self._experience = experience
        self._backward = LayerMajorBackward(len(job.batches), parts.gradients, parts.keep)
        self._places: list[list[int]] = []
        self._has_begun = False  # some piece has run backward
        self.losses: list[torch.Tensor] = []

    def forward(self, before: Before) -> RandomState:
        """Run all forwards and return the random state that they leave.

        A CannotCutError if they are not those of a loop or cannot be cut: then nothing has run backward.
        """
        if inside_dispatch_mode():
            raise CannotCutError("a dispatch mode of torch is active")
        others, begin = other_generators(), random_state(self._parts.device)
        micro_batches = self._run(begin)
        # Together: at stage 3 ranks gather parameters in forward.
        if self._parts.anywhere(not _follow_each_other(micro_batches)):
            if self._parts.anywhere(not self._measure(micro_batches)):
                raise CannotCutError("how many random numbers its forward draws is not known")
            micro_batches = []
            self._forget()
            before.put_back()
            micro_batches = self._run(begin)
            if not _follow_each_other(micro_batches):
                raise CannotCutError("how many random numbers its forward draws is not known before")
        if not are_same(others, other_generators()):
            self._refuse("it draws random numbers from Python or numpy")
        if not self._places[0]:
            raise CannotCutError("its forward calls none of its repeated blocks")
        if self._parts.has_ranks:
            if not self._is_uniform:
                raise CannotCutError("its micro-batches go through different blocks")
            self._backward.check_units()
        return micro_batches[-1].now

    def backward(self) -> list[torch.Tensor]:
        """Run what is left of all backwards; return the losses."""
        self._backward.run(is_uniform=self._is_uniform)
        return self.losses

    @property
    def _is_uniform(self) -> bool:
        return all(places == self._places[0] for places in self._places)

    @property
    def _may_begin_early(self) -> bool:
        """True if no forward that is still running could be a reason to go back."""
        return self._experience.is_proven and not any(self._experience.moves.values()) and not self._parts.has_ranks

    def _run(self, begin: RandomState) -> list[MicroBatch]:
        """Run the forwards of all micro-batches, each with the random state that those before it will have left."""
        turns, micro_batches = Turns(), []
        state, moves = begin, self._experience.moves
        for batch in self._job.batches:
            micro_batches.append(MicroBatch(self._forward_of(batch), self._parts.forwards, state))
            state = state.moved(moves.get(_shapes(batch), Distance()))
        with pausing(self._stacks, turns):
            turns.run(micro_batches, self._ended)
        return micro_batches

    def _forward_of(self, batch: Any) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            try:
                return self._job.loss(batch)
            finally:
                if self._parts.backward_scaling is not None:
                    self._parts.backward_scaling.end_step()  # what it has done in this thread

        return forward

    def _ended(self, micro_batch: MicroBatch) -> None:
        """The forward of the next micro-batch has ended."""
        loss = micro_batch.take_loss()
        self.losses.append(loss.detach())
        self._places.append(micro_batch.places)
        if self._may_begin_early and not micro_batch.now.equals(micro_batch.begin):
            self._refuse("it draws random numbers, which it did not before")
        try:
            self._backward.add(micro_batch.graph, loss)
        except CannotCutError as error:
            self._refuse(str(error))
        del loss
        if self._may_begin_early:
            self._has_begun = True
            self._backward.run_last_piece()

    def _refuse(self, reason: str) -> None:
        if not self._has_begun:
            raise CannotCutError(reason)
        raise UsageError(
            f"zi.accumulate cannot go on: micro-batch {len(self.losses) - 1} is not as those before it: {reason}\n"
            "  fix:   give such micro-batches to an ordinary loop of loss.backward()"
        )

    def _measure(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Learn how far the forwards move the generators; False if that is not known."""
        for batch, micro_batch in zip(self._job.batches, micro_batches, strict=True):
            move = micro_batch.begin.distance_to(micro_batch.now)
            if move is None:
                return False
            self._experience.moves[_shapes(batch)] = move
        return True

    def _forget(self) -> None:
        self._backward = LayerMajorBackward(len(self._job.batches), self._parts.gradients, self._parts.keep)
        self._places.clear()
        self.losses.clear()


def _shapes(batch: Any) -> Shapes:
    return tuple(leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _follow_each_other(micro_batches: Sequence[MicroBatch]) -> bool:
    """True if each has begun with the random state that the one before it has left."""
    return all(earlier.now.equals(later.begin) for earlier, later in pairwise(micro_batches))
