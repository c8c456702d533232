"""The functions that a training script calls.

Owns argument checks and the wiring of the parts; the work is done by the engine and by `checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from zero_infinity import meta_init
from zero_infinity.argument_checks import check_config, check_model, check_prepare
from zero_infinity.checkpoint.export import WeightExport
from zero_infinity.checkpoint.io_thread_pool import Progress
from zero_infinity.checkpoint.load import CheckpointLoad
from zero_infinity.checkpoint.load_pretrained import PretrainedLoad
from zero_infinity.checkpoint.save import CheckpointSave
from zero_infinity.checkpoint.snapshot import Which
from zero_infinity.checkpoint.training_view import UnpreparedModel
from zero_infinity.comm.process_group import find_group
from zero_infinity.config import Config
from zero_infinity.deferred_init import DeferredInit, under_way
from zero_infinity.engine import TrainingEngine
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.engine_stats import Stats
from zero_infinity.errors import UsageError
from zero_infinity.hugging_face_loading import one_tensor_at_a_time
from zero_infinity.optim.no_updates import NoUpdates
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer, streamed_optimizer
from zero_infinity.params.model_device import find_accelerator, move_unmanaged
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.params.unshard import Unsharder, unsharder_of
from zero_infinity.tiers.compute_device import ComputeDevice

Model = TypeVar("Model", bound=nn.Module)


@overload
def prepare(
    model: Model,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    device: torch.device | str | ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer]: ...
@overload
def prepare(
    model: Model,
    optimizer: None = None,
    config: Config | None = None,
    *,
    device: torch.device | str | ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
) -> Model: ...
def prepare(
    model: Model,
    optimizer: Optimizer | None = None,
    config: Config | None = None,
    *,
    device: torch.device | str | ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer] | Model:
    """Move a model's states to the tiers of `config` and return the model and the optimizer to train it with.

    Without an optimizer the model is for inference, and only the model is returned: there are no optimizer states and
    no gradients (`requires_grad` is set to False), and what fits in the budget stays in memory between forwards.

    The model is prepared in place: it stays the same object, with the same parameter objects and unchanged code. Call
    this once for each model, before the first step.

    Args:
        model: Any module, built normally or inside `init`. One on the meta device is initialised here, layer by layer:
            by its `init_weights()`, else by `reset_parameters()` of each module; all ranks get the values of rank 0.
        optimizer: An optimizer over the model's parameters that updates each element on its own (`AdamW`, `SGD` and
            most others), or each parameter (`Muon`, `Adafactor`, SOAP, ...), which it then gets whole. For several see
            `combine_optimizers`. None: for inference.
        config: The settings; `Config()` if omitted. Must equal the one given to `init`, if the model was built there.
        device: The device to compute on, such as "cuda:1" or "cpu". Default: the accelerator that the model is on;
            for a model on the CPU the current accelerator, if torch finds one. An `EmulatedAccelerator` emulates one.
        group: The ranks that share the states, as a process group or a one-dimensional device mesh. Default: the
            default process group, if it is initialized; otherwise one rank.
        activation_group: The ranks that compute identical activations (the tensor-parallel group). Each then keeps a
            part of the inputs of recomputed blocks.

    Returns:
        Without an optimizer the same model. Otherwise the same model, and an optimizer that is a
        `torch.optim.Optimizer` and shares its `param_groups` with the given one, so learning-rate schedulers work with
        either. Step with the returned one. A backward inside its `no_sync()` context only accumulates gradients. Its
        `grad_norm` is the norm of the last step if `max_grad_norm` is set.

    Raises:
        CapacityError: The model cannot be trained within the budget. The message names the least `memory`.
        UsageError: The model is already prepared, or the optimizer mixes parameters or needs more than gradients.
    """
    if optimizer is None and activation_group is not None:
        raise UsageError(
            "activation_group= splits what backward needs, and a model without an optimizer has no backward\n"
            "  fix:   leave it out"
        )
    if optimizer is None:
        _prepare(DEFAULT_PARTS, model, NoUpdates(), config, device, group)
        return model
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
    engine = _prepare(parts, model, optimizer, config, device, group, activation_group)
    return model, streamed_optimizer(engine, optimizer)


def _prepare(
    parts: EngineParts,
    model: nn.Module,
    optimizer: Optimizer,
    config: Config | None,
    device: torch.device | str | ComputeDevice | None,
    group: ProcessGroup | DeviceMesh | None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> TrainingEngine:
    check_prepare(model, optimizer, config)
    if isinstance(optimizer, StreamedOptimizer) or any(map(_is_prepared, _unsharders(model))):
        raise UsageError(
            "this model, or another one from the same zi.init, is prepared already\n"
            "  fix:   call zi.prepare once for each model, with a plain optimizer; one zi.init for each model"
        )
    config = config or Config()
    replicas = find_group(activation_group) if activation_group is not None else None
    ranks = parts.find_ranks(group, parts.make_traffic)
    if meta_init.is_on_meta(model):
        meta_init.build(model, config, ranks, parts)
    accelerator = find_accelerator(model, device, config, ranks)
    engine = TrainingEngine(model, optimizer, config, accelerator, ranks, replicas, parts)
    if accelerator is not None:
        move_unmanaged(model, accelerator.device)
    return engine


def init(
    config: Config | None = None, *, group: ProcessGroup | DeviceMesh | None = None
) -> AbstractContextManager[None]:
    """Build models inside this context with their parameters on the tiers of `config`, never whole in memory.

    Parameter values are the same as without it for the same seed. Not needed for models that fit in memory. Inside,
    `from_pretrained` of transformers streams weights tensor by tensor.

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
    check_config(config)
    if (outer := under_way()) is not None:  # of the whole model, to which this submodule belongs
        outer.check_same_config(config or Config())
        yield
        return
    construction = DeferredInit(config or Config(), parts.find_ranks(group, parts.make_traffic), parts)
    handles = (
        register_module_parameter_registration_hook(construction),
        register_module_module_registration_hook(construction.registered),
    )
    construction.begin()
    try:
        with one_tensor_at_a_time():
            yield
        construction.close()
    finally:
        construction.end()
        for handle in handles:
            handle.remove()


@contextmanager
def gathered(
    parameters: torch.Tensor | nn.Module | Iterable[torch.Tensor], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Hold the full values of these parameters in memory inside this context; edits are kept.

    With `update="after_backward"`, their accumulated gradients are available as `.grad` between backward and step.
    On several ranks all of them call it. Afterwards every rank has the values and gradients of one of them; an edit
    that only another rank made is an error.

    Args:
        parameters: A parameter, several, or a module (all of its parameters). They must fit in `memory` together.
        modifier_rank: The rank whose edits count. Default: the first.
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
            stack.enter_context(unsharder.gathered(members, modifier_rank))
        yield


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradient norm between backward and step: `torch.nn.utils.clip_grad_norm_`, which works as well.

    Called in each step from the first one on, it lets updates wait for `step()`; for a later first call, set
    `update="after_backward"`. `Config(max_grad_norm=...)` does the same without a call, and faster on several ranks.

    Args:
        parameters: Of prepared models and others.
        max_norm: The largest norm allowed, over all ranks. On several ranks, all call this. The rest is as in torch.

    Returns:
        The norm before clipping.
    """
    norm: torch.Tensor = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return norm


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: StreamedOptimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    background: bool = False,
    trained_only: bool = False,
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
        trained_only: Leave out frozen parameters, such as the base of adapters. Load it with `strict=False` into a
            model that has them.
        progress: Called as `progress(bytes_written, bytes_total)` for this rank, from any thread.

    Returns:
        The folder of the new checkpoint.
    """
    engine = _engine_of_both(model, optimizer)
    which = Which.TRAINED if trained_only else Which.ALL
    saving = CheckpointSave(model, engine, with_optimizer=optimizer is not None, which=which)
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
    check_model(model)
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
    check_model(model)
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
