"""Dynamic loss scaling for models that compute in float16, without changes to the training loop.

Gradients of float16 activations underflow, so a backward begins with the scale instead of one (`scaled_backward.py`),
and each gradient of a parameter is divided by it as it arrives, in the dtype of its optimizer record. So everything
after that (accumulation, norms, gradients that the user sees or sets) knows nothing of a scale. (Between ranks they
are sent with the scale, if they are sent in float16.) A gradient of a backward that was not scaled is refused.

The scale halves when a gradient overflows (that step is skipped) and doubles after a long run without overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_infinity._torch import current_graph_task_id
from zero_infinity.errors import UsageError
from zero_infinity.params.uncopied_hook import Hook

_FIRST_SCALE = 2.0**16
_GROW_AFTER = 2000


class LossScale:
    """The current scale and its history."""

    def __init__(self) -> None:
        self.scale = _FIRST_SCALE
        self.num_skipped = 0
        self._num_good = 0
        self.applied: float | None = None  # what the backward that runs began with

    def state_dict(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return {"scale": self.scale, "num_skipped": self.num_skipped, "num_good": self._num_good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale = float(state["scale"])
        self.num_skipped, self._num_good = int(state["num_skipped"]), int(state["num_good"])

    @contextmanager
    def applying(self, factor: float) -> Iterator[None]:
        """Inside, a backward runs that began with `factor`."""
        self.applied = factor
        try:
            yield
        finally:
            self.applied = None

    @property
    def divisor(self) -> float:
        """What a gradient that arrives now has to be divided by."""
        if current_graph_task_id() < 0:
            return 1.0  # set by hand
        if self.applied is None:
            raise UsageError(
                "a backward through a float16 model began without its loss scale, so gradients have underflowed\n"
                "  fix:   call loss.backward() in the thread that computed the loss, after a forward with gradients "
                'enabled (checkpoint the whole model with use_reentrant=False); or compute_dtype="bfloat16"'
            )
        return self.applied

    def skips(self, norms: Iterable[torch.Tensor]) -> bool:
        """Adjust the scale for the next step; True if one of these norms, of all gradients, overflowed."""
        overflowed = not all(torch.isfinite(norm).item() for norm in norms)
        self.judge(overflowed=overflowed)
        return overflowed

    def judge(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step whose gradients overflowed or not."""
        if overflowed:
            self.scale /= 2
            self.num_skipped += 1
            self._num_good = 0
            return
        self._num_good += 1
        if self._num_good == _GROW_AFTER:
            self.scale *= 2
            self._num_good = 0


class CastInputs(Hook):
    """Before the model's forward: casts floating-point inputs to the compute dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _map_tensors(args, self._cast), _map_tensors(kwargs, self._cast)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _map_tensors(value: Any, change: Any) -> Any:
    """Apply `change` to each tensor in nested tuples, lists and dicts (and their subclasses, such as model outputs)."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        for key in list(value):
            changed = _map_tensors(value[key], change)
            if changed is not value[key]:
                value[key] = changed
    return value
