"""`zi.accumulate`: one step over several micro-batches. Owns the checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zero_infinity.accumulation.job import AccumulationJob
from zero_infinity.api import engine_of
from zero_infinity.errors import UsageError


def accumulate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    *,
    average: bool = True,
) -> list[torch.Tensor]:
    """Accumulate the gradients of several micro-batches, each layer's for all of them before the next layer's.

    Does what this loop does, to the bit, and reads parameters and writes gradients once for all micro-batches:

        for batch in batches:
            (loss_fn(model, batch) / len(batches)).backward()

    It needs repeated blocks (`checkpoint_modules` names them, as for recomputation) and keeps what backward needs of
    all micro-batches at once: use `checkpoint_activations`. The first call runs this loop, and the forwards once more
    to see that both give the same; if not, it says why and always runs the loop.

    Args:
        model: A prepared model.
        batches: The micro-batches. All are taken before the first one is used.
        loss_fn: Called as `loss_fn(model, batch)`; returns the loss of one micro-batch, a tensor of one element. It
            runs in another thread.
        average: Divide each loss by the number of micro-batches.

    Returns:
        The losses by micro-batch, detached, and divided if `average` is set.
    """
    taken = list(batches)
    if not taken:
        raise UsageError("zi.accumulate got no micro-batches\n  fix:   give it one at least")
    engine = engine_of(model)
    return engine.accumulation.run(AccumulationJob(model, taken, loss_fn, float(len(taken)) if average else 1.0))
