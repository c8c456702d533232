"""Builds and initialises a model whose parameters are on the meta device, layer by layer, as `zi.init` does.

Such a model has shapes and no values. Its parameters move into blocks; then the model initialises itself: by its own
`init_weights()` (Hugging Face models have one), else by `reset_parameters()` of each module, children first. That is
what plain PyTorch's `model.to_empty(...)` and `model.apply(...)` do with the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zero_infinity._torch import own_buffers, version_of
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.deferred_init import DeferredInit
from zero_infinity.engine_parts import EngineParts
from zero_infinity.errors import UsageError
from zero_infinity.params.find_parameters import own_parameters
from zero_infinity.params.offloaded_param import managed, replace_by

_CPU = torch.device("cpu")
_FIX = (
    "\n  fix:   give the model an init_weights(), or these modules a reset_parameters(), that sets every parameter and "
    "buffer; or build the model inside zi.init instead of on the meta device"
)


def is_on_meta(model: nn.Module) -> bool:
    """True if some parameters or buffers of the model have no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def build(model: nn.Module, config: Config, ranks: RankGroup | None, parts: EngineParts) -> None:
    """Give every parameter and buffer that is on the meta device a place and its initial value."""
    own_init = callable(getattr(model, "init_weights", None))
    if not own_init:
        _check_that_all_can_reset(model)
    construction = DeferredInit(config, ranks, parts)
    with _same_random_numbers(ranks):
        construction.begin()
        try:
            made = dict(_materialize(model, construction))
            construction.close_modules()
            before = {name: _version(tensor) for name, tensor in made.items()}
            if own_init:
                model.init_weights()  # type: ignore[operator]
            else:
                model.apply(_reset)
            construction.close()
        finally:
            construction.end()
    untouched = [name for name, tensor in made.items() if tensor.numel() and _version(tensor) == before[name]]
    if untouched:
        raise UsageError(f"{_listed(untouched)} came from the meta device and got no initial value{_FIX}")


def _materialize(model: nn.Module, construction: DeferredInit) -> Iterator[tuple[str, torch.Tensor]]:
    """Move uninitialised memory for each module into blocks; yields what has to be initialised, by name."""
    done: set[int] = set()
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, parameter in own_parameters(module).items():
            if parameter.is_meta and id(parameter) not in done:
                done.add(id(parameter))
                replace_by(parameter, torch.empty_like(parameter, device=_CPU, requires_grad=False))
                construction(module, name, parameter)
                yield prefix + name, parameter
        buffers = own_buffers(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_meta:
                buffers[name] = fresh = torch.empty_like(buffer, device=_CPU)
                yield prefix + name, fresh


def _reset(module: nn.Module) -> None:
    reset = _reset_of(module)
    if reset is not None:
        reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initialisation; that of nn.MultiheadAttention has an underscore."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _check_that_all_can_reset(model: nn.Module) -> None:
    without = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _reset_of(module) is None
        and any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]
    if without:
        raise UsageError(f"{_listed(without)} is on the meta device and cannot initialise itself{_FIX}")


def _version(tensor: torch.Tensor) -> int:
    known = managed(tensor)
    return known.version if known is not None else version_of(tensor)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@contextmanager
def _same_random_numbers(ranks: RankGroup | None) -> Iterator[None]:
    """Inside, every rank draws the numbers that rank 0 draws, whose generator alone goes on from them."""
    if ranks is None:
        yield
        return
    mine = torch.get_rng_state()
    state = ranks.phases.tell("the random state of rank 0", mine.numpy().tobytes().hex() if ranks.rank == 0 else "")[0]
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    try:
        yield
    finally:
        if ranks.rank != 0:
            torch.set_rng_state(mine)
