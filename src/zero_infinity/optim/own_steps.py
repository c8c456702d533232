"""Finds optimizers of which groups and states do not show everything: wrappers of others, settings by identity.

A probe cannot see it. A wrapper steps the optimizer inside, which has groups of its own, and the probe would compare
two steps that change nothing.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from zero_infinity.optim.combined_optimizer import CombinedOptimizer
from zero_infinity.optim.parameter_probe import refusal


def check_wrapped(optimizer: Optimizer) -> None:
    """Raise if another optimizer is inside."""
    if isinstance(optimizer, CombinedOptimizer):
        return
    inner = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    if inner is None:
        return
    kind, name = type(optimizer).__name__, type(inner).__name__
    if callable(getattr(optimizer, "first_step", None)):  # sharpness-aware minimisation
        reason = f"its first step moves all weights by the norm of all gradients, between two backward passes of {name}"
        raise refusal(
            kind, reason, f"prepare with {name}, and take the two steps in your loop (docs/howto/optimizers.md)"
        )
    reason = f"it wraps {name}, whose states and steps are its own"
    fix = f"prepare with {name}; or write its rule as one optimizer, with everything that it keeps in `state`"
    raise refusal(kind, reason, fix)


def check_single_settings(optimizer: Optimizer) -> None:
    """Raise if bitsandbytes has settings for single parameters, which it knows by their identity."""
    known: Any = getattr(optimizer, "mng", None)
    if known is None:
        return
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    of_modules = {
        id(getattr(module, name, None)) for module, name, _ in getattr(known, "module_weight_config_triple", ())
    }
    if mine & {*of_modules, *getattr(known, "pid2config", ())}:
        reason = "GlobalOptimManager has settings for single parameters, and records are not known by it"
        fix = "zi.combine_optimizers with an optimizer of their own for these parameters (AdamW32bit for embeddings)"
        raise refusal(type(optimizer).__name__, reason, fix)
