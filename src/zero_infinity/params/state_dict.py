"""`state_dict()` and `load_state_dict()` of a prepared model: one returns copies, the other copies into place.

While a `StateDictScope` is open, `unshard.py: call_unsharded` returns clones instead of views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from zero_infinity._torch import state_dict_pre_hooks
from zero_infinity.errors import UsageError
from zero_infinity.params.uncopied_hook import Hook


class StateDictScope:
    """Counts the state_dicts being made: their tensors are copies, because views would pin every unit."""

    def __init__(self) -> None:
        self._num_open = 0

    @property
    def is_open(self) -> bool:
        return self._num_open > 0

    def begin(self) -> None:
        self._num_open += 1

    def end(self) -> None:
        self._num_open -= 1


class CopyStates(Hook):
    """During `state_dict()`, `detach` returns copies: views of every parameter would pin the whole model."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change

    def __call__(self, *_: Any) -> None:
        self._change()


class RefuseAssignment(Hook):
    """`load_state_dict(assign=True)` would replace managed parameters by unmanaged ones."""

    def __call__(self, _: nn.Module, __: Any, prefix: str, metadata: Mapping[str, Any], *___: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                f"load_state_dict(assign=True) would replace the managed parameters of {prefix or 'the model'!r}\n"
                "  fix:   load_state_dict(...) without assign, which copies the values"
            )


def attach_state_dict_hooks(module: nn.Module, state_dicts: StateDictScope) -> None:
    """Make the module's state_dict return copies, and its load_state_dict copy into the existing parameters."""
    if any(isinstance(hook, CopyStates) for hook in state_dict_pre_hooks(module)):
        return
    module.register_state_dict_pre_hook(CopyStates(state_dicts.begin))
    module.register_state_dict_post_hook(CopyStates(state_dicts.end))
    module.register_load_state_dict_pre_hook(RefuseAssignment())
