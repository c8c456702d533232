"""`optimizer.step()` over streamed gradients: unscaling, clipping, update, and user access to gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from zero_infinity._torch import no_torch_function
from zero_infinity.comm.channel import Channel
from zero_infinity.optim.clipping import Norms, clip_factor, global_norms, on_host
from zero_infinity.optim.gradient_flow import GradientFlow
from zero_infinity.optim.group_settings import GroupSettings
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.resident_params import ResidentParameters
from zero_infinity.optim.user_gradients import ParameterGradient
from zero_infinity.params.dtensor import like, local_of
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
        groups: GroupSettings,
    ) -> None:
        self._gradients = gradients
        self._resident = resident
        self._managed = managed_parameters
        self._model_parameters = model_parameters
        self._max_grad_norm = max_grad_norm
        self._loss_scale = loss_scale
        self._channel = channel
        self._groups = groups
        self.grad_norm: torch.Tensor | None = None

    def run(self) -> bool:
        """Update with the remaining gradients; False if they overflowed and the step was skipped."""
        self._gradients.lifetimes.begin_step()
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
            if self._loss_scale is not None or not self._gradients.are_on_device:
                norms = on_host(norms)
            norms = global_norms(norms)
        if self._loss_scale is not None and self._loss_scale.skips(norms.values()):
            self._gradients.skip()
            return False
        if self._max_grad_norm is not None:
            self.grad_norm, factor = clip_factor(norms, self._model_parameters, self._max_grad_norm)
            if factor.device.type != "cpu" or factor != 1:  # multiplying by one changes no bit
                factors += (factor,)
        self._gradients.step(factors)
        self._resident.step(factors)
        self._groups.advance()
        return True

    @contextmanager
    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """Inside this context retained gradients are on the (unsharded) parameters; changes to them are kept."""
        shown = [m for m in parameters if m.group is not None]
        filled = set()
        for known in shown:
            if any(self._gradients.can_show(part) for part in known.parts) and known.parameter.grad is None:
                known.parameter.grad = like(known.parameter, ParameterGradient(self._gradients, known).read())
                filled.add(known)
        try:
            yield
        finally:
            for known in shown:
                gradient = known.parameter.grad
                known.parameter.grad = None
                for part in known.parts if gradient is not None or known in filled else ():
                    if gradient is None:
                        self._gradients.drop(part, to_none=True)
                    else:
                        self._gradients.replace(part, part.rows_of(local_of(gradient)))

    def discard_gradients(self, *, set_to_none: bool) -> None:
        """Drop gradients for which no update was submitted, or set those that existed to zero."""
        with no_torch_function():
            self._gradients.discard(to_none=set_to_none)
            self._resident.zero_grad(set_to_none=set_to_none)
            for parameter, known in self._managed.items():
                if known.group is not None:
                    parameter.grad = None

    def _take_zeros(self) -> None:
        """A gradient that was set to zero and got nothing since is a gradient: zeros."""
        for part in list(self._gradients.lifetimes.zeros):
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
