"""Hands the values of a prepared model to another engine, one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from zero_infinity.errors import UsageError
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.packed_tensor import PackedTensor, values_of
from zero_infinity.params.unshard import unsharder_of


def stream_weights(model: nn.Module, *, buffers: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of every parameter and buffer of a prepared model, one at a time within the budget.

    For handing weights to another engine, such as one that generates. Use a value, or copy it, before the next one is
    asked for. A tied parameter is yielded once. On several ranks all of them iterate, and each gets whole values.

    Args:
        model: A prepared model.
        buffers: False: only parameters.
    """
    parameters = dict(model.named_parameters())
    if all(managed(parameter) is None for parameter in parameters.values()):
        raise UsageError("this model is not prepared\n  fix:   zi.prepare(model, optimizer, config)")
    for name, parameter in parameters.items():
        known = managed(parameter)
        if isinstance(parameter, PackedTensor):
            yield name, values_of(parameter)
        elif known is None:
            yield name, parameter.detach()
        else:
            with unsharder_of(known).unsharded([known]):
                yield name, parameter.detach()
    for name, buffer in model.named_buffers() if buffers else ():
        yield name, values_of(buffer) if isinstance(buffer, PackedTensor) else buffer
