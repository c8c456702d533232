"""The functions that a training script calls.

Owns argument checks and the wiring of the parts; the work is done by the engine and by `checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from zero_infinity.checkpoint.export import WeightExport
from zero_infinity.checkpoint.io_thread_pool import Progress
from zero_infinity.checkpoint.load import CheckpointLoad
from zero_infinity.checkpoint.load_pretrained import PretrainedLoad
from zero_infinity.checkpoint.save import CheckpointSave
from zero_infinity.checkpoint.training_view import UnpreparedModel
from zero_infinity.comm.process_group import find_group
from zero_infinity.config import Config
from zero_infinity.deferred_init import DeferredInit
from zero_infinity.engine import TrainingEngine
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.engine_stats import Stats
from zero_infinity.errors import UsageError
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer
from zero_infinity.params.model_device import find_accelerator, move_unmanaged
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unshard import Unsharder, unsharder_of
from zero_infinity.tiers.compute_device import ComputeDevice

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    device: torch.device | str | ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer]:
    """Move a model's states to the tiers of `config` and return the model and the optimizer to train it with.

    The model is prepared in place: it stays the same object, with the same parameter objects and unchanged code. Call
    this once for each model, before the first step.

    Args:
        model: Any module, built normally or inside `init`.
        optimizer: A `torch.optim` optimizer over the model's parameters. It must be element-wise: `Adam`, `AdamW`,
            `SGD` and most others are; `LBFGS`, `SparseAdam`, `Muon` and `Adafactor` are refused.
        config: The settings; `Config()` if omitted. Must equal the one given to `init`, if the model was built there.
        device: The device to compute on, such as "cuda:1" or "cpu". Default: the accelerator that the model is on;
            for a model on the CPU the current accelerator, if torch finds one. An `EmulatedAccelerator` emulates one.
        group: The ranks that share the states, as a process group or a one-dimensional device mesh. Default: the
            default process group, if it is initialized; otherwise one rank.
        activation_group: The ranks that compute identical activations (the tensor-parallel group). Each then keeps a
            part of the inputs of recomputed blocks.

    Returns:
        The same model, and an optimizer that is a `torch.optim.Optimizer` and shares its `param_groups` with the given
        one, so learning-rate schedulers work with either. Step with the returned one. A backward inside its `no_sync()`
        context only accumulates gradients. Its `grad_norm` is the norm of the last step if `max_grad_norm` is set.

    Raises:
        CapacityError: The model cannot be trained within the budget. The message names the least `memory`.
        UsageError: The model is already prepared, or the optimizer is not element-wise.
    """
    return prepare_with(
        DEFAULT_PARTS,
        model,
        optimizer,
        config,
        device=device,
        group=group,
        activation_group=activation_group,
    )


def prepare_with(
    parts: EngineParts,
    model: Model,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    device: torch.device | str | ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer]:
    """Internal: `prepare` with parts of the engine replaced. A model from `init_with` keeps the parts given there."""
    if isinstance(optimizer, StreamedOptimizer) or any(map(_is_prepared, _unsharders(model))):
        raise UsageError(
            "this model, or another one from the same zi.init, is prepared already\n"
            "  fix:   call zi.prepare once for each model, with a plain optimizer; one zi.init for each model"
        )
    config = config or Config()
    replicas = find_group(activation_group) if activation_group is not None else None
    ranks = find_group(group, parts.make_traffic)
    accelerator = find_accelerator(model, device, config, ranks)
    engine = TrainingEngine(model, optimizer, config, accelerator, ranks, replicas, parts)
    if accelerator is not None:
        move_unmanaged(model, accelerator.device)
    return model, StreamedOptimizer(engine, optimizer)


def init(
    config: Config | None = None, *, group: ProcessGroup | DeviceMesh | None = None
) -> AbstractContextManager[None]:
    """Build models inside this context with their parameters on the tiers of `config`, never whole in memory.

    Parameter values are the same as without it for the same seed. Not needed for models that fit in memory.

    Args:
        config: Give the same config to `prepare` afterwards.
        group: The ranks that share the states; each keeps its shard. All ranks must use the same seed.
    """
    return init_with(DEFAULT_PARTS, config, group=group)


@contextmanager
def init_with(
    parts: EngineParts, config: Config | None = None, *, group: ProcessGroup | DeviceMesh | None = None
) -> Iterator[None]:
    """Internal: `init` with parts of the engine replaced; `prepare` then uses the same ones."""
    construction = DeferredInit(config or Config(), find_group(group, parts.make_traffic), parts)
    handles = (
        register_module_parameter_registration_hook(construction),
        register_module_module_registration_hook(construction.registered),
    )
    construction.begin()
    try:
        yield
        construction.close()
    finally:
        construction.end()
        for handle in handles:
            handle.remove()


@contextmanager
def gathered(parameters: torch.Tensor | nn.Module | Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold the full values of these parameters in memory inside this context; edits are kept.

    With `update="after_backward"`, their accumulated gradients are available as `.grad` between backward and step.

    Args:
        parameters: A parameter, several, or a module (all of its parameters). They must fit in `memory` together.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    elif isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    by_model: dict[Unsharder, list[ManagedParameter]] = {}
    for parameter in parameters:
        known = managed(parameter)
        if known is not None:
            by_model.setdefault(unsharder_of(known), []).append(known)
    with ExitStack() as stack:
        for unsharder, members in by_model.items():
            stack.enter_context(unsharder.gathered(members))
        yield


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip the gradient norm of a prepared model, like `torch.nn.utils.clip_grad_norm_`.

    Call it between backward and step; needs `update="after_backward"`. `Config(max_grad_norm=...)` does the same
    without a call.

    Args:
        parameters: Parameters of one prepared model.
        max_norm: The largest norm allowed, over all ranks.

    Returns:
        The norm before clipping.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    owners = {unsharder_of(known).owner for p in listed if (known := managed(p)) is not None}
    engine = owners.pop() if len(owners) == 1 else None
    if not isinstance(engine, TrainingEngine):
        raise UsageError(
            "zi.clip_grad_norm_ takes the parameters of one prepared model\n"
            "  fix:   use torch.nn.utils.clip_grad_norm_ for models that are not prepared, one call for each model"
        )
    return engine.clip_now(listed, max_norm)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: StreamedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    background: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Save a prepared model as a new checkpoint in the directory `path`.

    Call it between two steps. On several ranks all of them call it, with a path on a file system that all of them see.

    Args:
        path: The directory of checkpoints. Each call adds one and points `latest` at it.
        model: A prepared model.
        optimizer: If given, its states and settings, the step count, the loss scale and the random states are saved
            too, so that training resumes exactly.
        extra: Anything else to restore: numbers, strings, lists, dicts, tensors up to 64 MiB, and objects with a
            `state_dict` (schedulers, data loaders).
        keep: Remove all but the newest `keep` checkpoints in `path` afterwards.
        background: Return as soon as the state is captured, and write it while training continues. `synchronize`, the
            next save or load, and the end of the process wait for it. An error is raised by the first of these; the end
            of the process can only warn.
        progress: Called as `progress(bytes_written, bytes_total)` for this rank, from any thread.

    Returns:
        The folder of the new checkpoint.
    """
    engine = _engine_of_both(model, optimizer)
    saving = CheckpointSave(model, engine, with_optimizer=optimizer is not None)
    return saving.write(Path(path), extra or {}, keep, background=background, progress=progress)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: StreamedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a prepared model.

    The number of ranks, stage, memory, drives and dtypes may differ from those of the run that saved it.

    Args:
        path: A checkpoint, or a directory of checkpoints (its latest is loaded).
        model: A prepared model.
        optimizer: If omitted, only parameters and buffers are loaded.
        extra: Objects with a `load_state_dict`, by the names under which they were saved; their states are restored.
        strict: If false, skip what the model or the checkpoint lacks. Otherwise every mismatch is reported in one
            error before anything changes.
        progress: Called as `progress(bytes_read, bytes_total)` for this rank, from any thread.

    Returns:
        What was saved as `extra` by this rank.

    Raises:
        CheckpointError: No checkpoint is there, it is damaged, or it does not fit the model.
    """
    engine = _engine_of_both(model, optimizer)
    loading = CheckpointLoad(model, engine, with_optimizer=optimizer is not None, strict=strict)
    return loading.read(Path(path), extra or {}, progress)


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: Progress | None = None
) -> None:
    """Stream safetensors weights into a model that was prepared or built inside `init`.

    The weights are never whole in memory: each rank reads its shard, in the dtype that it stores. Names and fused
    weights are converted as `from_pretrained` of transformers does. Master weights are set; optimizer states are not
    touched. May be called inside `init`, once the model is built.

    Args:
        model: A prepared model, or one built inside `init`.
        path: A Hugging Face folder, one safetensors file, or the index of several.
        strict: If false, skip what the model or the file lacks.
        progress: Called as `progress(bytes_read, bytes_total)` for this rank, from any thread.
    """
    unsharders = _unsharders(model)
    if len(unsharders) != 1:
        raise UsageError(
            "this model was neither prepared nor built inside of zi.init\n"
            "  fix:   zi.prepare(model, optimizer, config) first; or from_pretrained, if it fits in memory"
        )
    owner = unsharders[0].owner
    view = owner if isinstance(owner, TrainingEngine) else UnpreparedModel(model, unsharders[0])
    PretrainedLoad(model, view, strict=strict).read(Path(path), progress)


def export(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a prepared model's weights as safetensors files that `from_pretrained` of transformers reads.

    On several ranks all of them call it. The config of a Hugging Face model is written too.

    Args:
        directory: A folder that does not exist or is empty.
        model: A prepared model.
        dtype: Of floating-point weights. Default: full precision, the master weights where there are any.
        progress: Called as `progress(bytes_written, bytes_total)` for this rank's temporary files, and then again from
            zero on the first rank, which writes the final files.
    """
    WeightExport(model, engine_of(model)).write(Path(directory), dtype, progress)


def _engine_of_both(model: nn.Module, optimizer: StreamedOptimizer | None) -> TrainingEngine:
    engine = engine_of(model)
    if optimizer is not None and getattr(optimizer, "engine", None) is not engine:
        raise UsageError(
            f"this {type(optimizer).__name__} is not the optimizer of this model\n"
            "  fix:   give the optimizer that zi.prepare has returned with the model"
        )
    return engine


def synchronize(model: nn.Module) -> None:
    """Wait for all pending updates and transfers, background saves included, and raise their errors.

    Correctness never needs it, because reading a parameter waits for its update. Call it before measuring time and at
    the end of a run on several ranks. Writes the file of `Config(trace=...)`.
    """
    engine = engine_of(model)
    engine.settle()
    engine.background_save.wait()
    engine.write_trace()


def stats(model: nn.Module) -> Stats:
    """Return what a prepared model holds and has done so far."""
    return engine_of(model).stats()


def close(model: nn.Module) -> None:
    """Free a prepared model's memory, files and connections now, instead of when it is collected. Its values are lost.

    On several ranks call it on all of them, after `synchronize`.
    """
    engine_of(model).parameter_store.close()


def engine_of(model: nn.Module) -> TrainingEngine:
    """Return the engine of a prepared model."""
    for unsharder in _unsharders(model):
        if isinstance(unsharder.owner, TrainingEngine):
            return unsharder.owner
    raise UsageError("this model is not prepared\n  fix:   zi.prepare(model, optimizer, config)")


def _unsharders(model: nn.Module) -> list[Unsharder]:
    known = (managed(parameter) for parameter in model.parameters())
    return list(dict.fromkeys(unsharder_of(m) for m in known if m is not None))


def _is_prepared(unsharder: Unsharder) -> bool:
    """True if its parameters are trained, or others from the same zi.init."""
    owner = unsharder.owner
    return owner.is_finished if isinstance(owner, DeferredInit) else True
