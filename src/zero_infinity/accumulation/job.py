"""The micro-batches of one call, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_infinity.errors import UsageError

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AccumulationJob:
    """The micro-batches of one call."""

    model: nn.Module
    batches: Sequence[Any]
    loss_of: LossFunction
    divisor: float

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss with which the backward of a micro-batch begins."""
        loss = self.loss_of(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError(
                f"the loss function of zi.accumulate returned {_described(loss)}\n"
                "  fix:   return the loss of the micro-batch, a tensor of one element"
            )
        return loss if self.divisor == 1 else loss / self.divisor


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
