"""`optimizer.step()` over streamed gradients: unscaling, clipping, update, and user access to gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zero_infinity._torch import no_torch_function
from zero_infinity.comm.channel import Channel
from zero_infinity.errors import UsageError
from zero_infinity.optim.clipping import Norms, clip, clip_factor, global_norms
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.params.dtensor import like, local_of
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter


class TrainingStep:
    """Runs the steps of one model."""

    def __init__(
        self,
        gradients: GradientFlow,
        resident: ResidentParameters,
        managed_parameters: Mapping[nn.Parameter, ManagedParameter],
        model_parameters: Sequence[nn.Parameter],
        *,
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
        channel: Channel | None,
    ) -> None:
        self._gradients = gradients
        self._resident = resident
        self._managed = managed_parameters
        self._model_parameters = model_parameters
        self._max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        self._channel = channel
        self._zeros = False  # zero_grad(set_to_none=False) was called
        self.grad_norm: torch.Tensor | None = None

    def run(self) -> bool:
        """Update with the remaining gradients; False if they overflowed and the step was skipped."""
        self._take_hand_made_gradients()
        self._take_zeros()
        self._gradients.before_step()
        if self._channel is not None and self._resident:
            self._resident.average(self._channel)
        factors: tuple[torch.Tensor, ...] = ()
        norms: Norms = {}
        if self._loss_scale is not None or self._max_grad_norm is not None:
            norms.update(self._gradients.norms.items())
            norms.update(self._resident.norms().items())
            norms = global_norms(norms)
        if self._loss_scale is not None:
            unscale = self._loss_scale.unscale_factor(norms.values())
            if unscale is None:
                self._gradients.skip()
                return False
            factors += (unscale,)
            norms = {parameter: norm * unscale for parameter, norm in norms.items()}
        if self._max_grad_norm is not None:
            self.grad_norm, factor = clip_factor(norms, self._model_parameters, self._max_grad_norm)
            factors += (factor,)
        self._gradients.step(factors)
        self._resident.step(factors)
        return True

    def clip_now(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the retained gradients of these parameters; returns their norm."""
        if self._gradients.cycle.updated:
            raise UsageError(
                "zi.clip_grad_norm_ is called too late: parameters were updated while backward ran\n"
                '  fix:   update="after_backward" or max_grad_norm=... in zi.Config'
            )
        clipped = list(parameters)
        found = [(p, torch.linalg.vector_norm(gradient)) for p, _, gradient in self._gradients_of(clipped)]
        norm, factor = clip(found, max_norm)
        for _, part, gradient in self._gradients_of(clipped):
            gradient.mul_(factor)
            if part is not None:
                self._gradients.replace(part, gradient)
        return norm

    def _gradients_of(
        self, parameters: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ManagedParameter | None, torch.Tensor]]:
        """Yield (parameter, its managed part, gradient): retained gradients, whole over data-parallel ranks.

        The part is None for gradients that are on their parameters.
        """
        for parameter in parameters:
            known = managed(parameter)
            if known is None or known.group is None:
                if parameter.grad is not None:
                    yield parameter, None, parameter.grad
                continue
            for part in known.parts:
                gradient = self._gradients.gather(part)
                if gradient is not None:
                    yield parameter, part, gradient

    @contextmanager
    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """Inside this context retained gradients are on the (unsharded) parameters; changes to them are kept."""
        shown = [m for m in parameters if m.group is not None]
        for known in shown:
            gradients = [g for part in known.parts if (g := self._gradients.gather(part)) is not None]
            whole = torch.cat(gradients) if len(gradients) > 1 else next(iter(gradients), None)
            if whole is not None:
                whole = like(known.parameter, whole.to(known.cell.device))
            known.parameter.grad = whole
        try:
            yield
        finally:
            for known in shown:
                gradient = known.parameter.grad
                known.parameter.grad = None
                if gradient is not None:
                    for part in known.parts:
                        self._gradients.replace(part, part.rows_of(local_of(gradient)))

    def discard_gradients(self, *, set_to_none: bool) -> None:
        """Drop gradients for which no update was submitted, or set those that existed to zero."""
        with no_torch_function():
            self._gradients.discard()
            if set_to_none:
                self._gradients.seen.clear()
            self._zeros = set_to_none is False
            self._resident.zero_grad(set_to_none=set_to_none)
            for parameter, known in self._managed.items():
                if known.group is not None:
                    parameter.grad = None

    def _take_zeros(self) -> None:
        """After zero_grad(set_to_none=False) even an unused parameter has a gradient: zeros."""
        if self._zeros:
            for part in [
                part
                for whole in self._managed.values()
                for part in whole.parts
                if part in self._gradients.seen and not self._gradients.has(part)
            ]:
                self._gradients.take(part, torch.zeros(part.shape, dtype=part.unit.compute_dtype))

    def _take_hand_made_gradients(self) -> None:
        """Take gradients that the user has set on parameters."""
        with no_torch_function():
            found = [(m, p.grad) for p, m in self._managed.items() if p.grad is not None and m.group is not None]
            for known, _ in found:
                known.parameter.grad = None
        for known, gradient in found:
            if gradient is not None:
                for part in known.parts:
                    self._gradients.take(part, part.rows_of(gradient))
