"""Accumulates the gradients of several micro-batches, layer by layer if the model allows it, else in the ordinary loop.

The first call for a model *proves* that both give the same: it runs the forwards layer by layer, puts random states and
buffers back, and then runs the ordinary loop, whose losses, random states and buffers must be the same bits. A model
that keeps something of one micro-batch on itself, or draws random numbers in a way that is not predicted, fails that,
and is always run in the ordinary loop. On several ranks, all of them go the same way.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import nn

from zero_infinity.accumulation.cut_graph import CannotCutError
from zero_infinity.accumulation.forward_effects import After, Before
from zero_infinity.accumulation.job import AccumulationJob
from zero_infinity.accumulation.layer_major import Experience, LayerMajorStep, Parts
from zero_infinity.accumulation.layer_major_backward import KeptGradient
from zero_infinity.accumulation.random_states import random_state
from zero_infinity.activations.block_finder import Stack, find_stacks
from zero_infinity.activations.offload import ActivationOffload
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.topics import MICRO_BATCHES
from zero_infinity.config import Config, ConfigWarning
from zero_infinity.errors import DivergenceError, UsageError
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.scaled_backward import BackwardScaling
from zero_infinity.params.module_hooks import ForwardStack


class Accumulation:
    """The accumulated backwards of one model."""

    def __init__(
        self,
        config: Config,
        forwards: ForwardStack,
        gradients: GradientFlow,
        *,
        backward_scaling: BackwardScaling | None,
        activations: ActivationOffload | None,
        channel: Channel | None,
        device: torch.device,
    ) -> None:
        self._config = config
        self._gradients = gradients
        self._activations = activations
        self._channel = channel
        self._parts = Parts(
            forwards,
            gradients,
            backward_scaling,
            self._keep,
            device,
            has_ranks=channel is not None,
            anywhere=self._anywhere,
        )
        self._experience = Experience()
        self._changing: set[str] | None = None  # names of the buffers that a forward changes
        self.reason = ""  # why micro-batches run one after another

    @property
    def is_layer_major(self) -> bool:
        """True if the next call runs layer by layer."""
        return self._experience.is_proven and not self.reason

    def run(self, job: AccumulationJob) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches; return their losses."""
        self._check_same_number(len(job.batches))
        if len(job.batches) == 1 or self.reason:
            return self._in_a_loop(job)
        if not self._experience.is_proven:
            return self._prove(job)
        before = self._before(job, self._changing)
        losses, refused = self._layer_major(job, before)
        if losses is not None:
            return losses
        self._warn(refused or "of another rank")
        before.put_back()
        return self._in_a_loop(job)

    def _layer_major(self, job: AccumulationJob, before: Before) -> tuple[list[torch.Tensor] | None, str]:
        """Return the losses; or None, and why this rank cannot run layer by layer."""
        refused = ""
        with self._gradients.in_pieces(len(job.batches)):
            try:
                step = self._step(job)
                step.forward(before)
            except CannotCutError as error:
                refused = str(error)
            if not self._anywhere(bool(refused)):
                return step.backward(), ""
        return None, refused

    def _step(self, job: AccumulationJob) -> LayerMajorStep:
        return LayerMajorStep(job, self._stacks(job.model), self._parts, self._experience)

    def _before(self, job: AccumulationJob, names: set[str] | None) -> Before:
        return Before(job.model, names, self._parts.device)

    def _stacks(self, model: nn.Module) -> list[Stack]:
        try:
            return find_stacks(model, self._config.checkpoint_modules)
        except UsageError as error:
            raise CannotCutError(str(error).split("\n")[0].split(": ", 1)[-1]) from None

    def _keep(self, gradient: torch.Tensor) -> KeptGradient:
        kept = self._activations.pack(gradient, is_input=False) if self._activations is not None else None
        return kept if kept is not None else _InMemory(gradient)

    def _in_a_loop(self, job: AccumulationJob) -> list[torch.Tensor]:
        """Run one micro-batch after another."""
        losses = []
        each_counts = self._config.gradient_accumulation_steps > 1
        for number, batch in enumerate(job.batches):
            loss = job.loss(batch)
            losses.append(loss.detach())
            is_last = number == len(job.batches) - 1
            with nullcontext() if is_last or each_counts else self._gradients.accumulating():
                loss.backward()
            del loss
        return losses

    def _prove(self, job: AccumulationJob) -> list[torch.Tensor]:
        """Run the ordinary loop, and see whether the forwards give the same layer by layer."""
        before = self._before(job, None)
        found, reason = self._layer_by_layer(job, before)
        changing = before.changed_names()
        before.put_back()
        losses = self._in_a_loop(job)
        if found is not None:
            reason = found.difference(After(losses, random_state(self._parts.device), before.buffers()))
        if not self._anywhere(bool(reason)):
            self._experience.is_proven, self._changing = True, changing
            self._gradients.cycle.change_order()
        else:
            self.reason = reason or "of another rank"
            self._warn(self.reason)
        return losses

    def _layer_by_layer(self, job: AccumulationJob, before: Before) -> tuple[After | None, str]:
        """Return what the forwards leave behind, or why they cannot be run layer by layer."""
        try:
            step = self._step(job)
            state = step.forward(before)
        except CannotCutError as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the ordinary loop may do without
            return None, f"{type(error).__name__}: {error}"
        return After(step.losses, state, before.buffers()), ""

    # ------------------------------------------------------------------ ranks, messages

    def _check_same_number(self, number: int) -> None:
        if self._channel is None:
            return
        numbers = [said[0] for said in self._channel.agree(MICRO_BATCHES, [number])]
        if any(n != numbers[0] for n in numbers):
            raise DivergenceError(
                f"ranks diverged: zi.accumulate got {', '.join(map(str, numbers))} micro-batches on ranks 0 to "
                f"{len(numbers) - 1}\n  fix:   give it the same number on every rank"
            )

    def _anywhere(self, mine: bool) -> bool:
        """True if it is true on any rank."""
        if self._channel is None:
            return mine
        return any(said[0] for said in self._channel.agree(MICRO_BATCHES, [int(mine)]))

    def _warn(self, reason: str) -> None:
        warnings.warn(
            f"zi.accumulate runs one micro-batch after another, as a loop does: {reason}\n"
            "  fix:   nothing, if that is fast enough: the results are the same; reported once",
            ConfigWarning,
            stacklevel=2,
        )


class _InMemory:
    """A gradient that stays where it is."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient

    def restore(self) -> torch.Tensor:
        return self._gradient
