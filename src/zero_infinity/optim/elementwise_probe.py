"""Probes whether an optimizer is element-wise, and which per-element state it keeps.

This is tested, not assumed: the probe runs the class on a small tensor, whole and in slices, and compares. Classes that
cannot be streamed are refused here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from zero_infinity.errors import UsageError
from zero_infinity.optim.update_rule import Hyperparameters, UpdateRule, hyperparameters_of, split_state

# Large enough for several slices, with a tail that is not a multiple of the vector width.
_PROBE_SHAPE = (13, 37)
_PROBE_CUT = 192
_PROBE_STEPS = 3

_REFUSED = {
    "LBFGS": "it needs a closure that evaluates the model several times in one step",
    "SparseAdam": "it needs sparse gradients, which are not streamed",
    "Muon": "it orthogonalises whole matrices, so updating a slice differs from updating the whole",
    "Adafactor": "it keeps row and column statistics of whole matrices",
}


def probe_state_names(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of this group's per-element state; raises `UsageError` if slices differ from the whole."""
    kind = type(optimizer).__name__
    if kind in _REFUSED:
        raise UsageError(_refusal(kind, _REFUSED[kind]))
    rule = UpdateRule(optimizer)
    hyperparameters = hyperparameters_of(group)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_PROBE_SHAPE, generator=generator).to(dtype)
    gradients = [torch.randn(_PROBE_SHAPE, generator=generator).to(dtype) for _ in range(_PROBE_STEPS)]
    try:
        whole, names = _run(rule, start, gradients, hyperparameters, cut=start.numel())
        sliced, _ = _run(rule, start, gradients, hyperparameters, cut=_PROBE_CUT)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(_refusal(kind, f"it fails on a flat slice of a parameter ({error})")) from error
    if not torch.equal(whole, sliced):
        raise UsageError(_refusal(kind, "updating a slice of a parameter differs from updating the whole"))
    return names


def _run(
    rule: UpdateRule, start: torch.Tensor, gradients: list[torch.Tensor], hyperparameters: Hyperparameters, cut: int
) -> tuple[torch.Tensor, tuple[str, ...]]:
    values = start.clone()
    names: tuple[str, ...] = ()
    whole = cut >= values.numel()
    pieces = [values] if whole else list(values.view(-1).split(cut))
    states: list[dict[str, Any]] = [{} for _ in pieces]
    for gradient in gradients:
        parts = [gradient] if whole else list(gradient.view(-1).split(cut))
        for index, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
            tensors, scalars = split_state(states[index], piece.shape)
            states[index] = rule.apply(piece, part.clone(), tensors, scalars, hyperparameters)
            for name, value in states[index].items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != piece.shape:
                    raise UsageError(_refusal(rule.kind, f"state {name!r} does not have the parameter's shape"))
            names = tuple(split_state(states[index], piece.shape)[0])
    return values, names


def _refusal(kind: str, reason: str) -> str:
    return (
        f"torch.optim.{kind} cannot be streamed: {reason}\n"
        "  fix:   use an element-wise optimizer (AdamW, Adam, SGD, Adagrad, RMSprop, Adamax, NAdam, RAdam, ...)"
    )
