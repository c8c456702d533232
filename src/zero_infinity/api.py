"""What a training script calls: the only place that puts the parts together."""

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
from zero_infinity.checkpoint.load import CheckpointLoad
from zero_infinity.checkpoint.pretrained import PretrainedLoad
from zero_infinity.checkpoint.progress import Progress
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
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.parameter_store import ParameterStore, store_of
from zero_infinity.params.unit import ManagedParameter
from zero_infinity.tiers.accelerator import ComputeDevice, TorchAccelerator

Model = TypeVar("Model", bound=nn.Module)


def prepare(
    model: Model,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    accelerator: ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer]:
    """Move the model's states to where `config` says; return the model and the optimizer to train it with.

    Works in place: `model` is the same object, its parameters are the same objects, and its code is not touched.
    `group`: the ranks to share the states with, or a device mesh of one dimension; else the default group, if any.
    `activation_group`: the ranks that compute the same activations (tensor parallel), given likewise; each then keeps a
    part of the inputs of recomputed blocks.
    `accelerator` is the one that torch finds, if any; an `EmulatedAccelerator` plays one on the CPU.
    """
    return prepare_with(
        DEFAULT_PARTS,
        model,
        optimizer,
        config,
        accelerator=accelerator,
        group=group,
        activation_group=activation_group,
    )


def prepare_with(
    parts: EngineParts,
    model: Model,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    accelerator: ComputeDevice | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    activation_group: ProcessGroup | DeviceMesh | None = None,
) -> tuple[Model, StreamedOptimizer]:
    """Internal: `prepare` with parts of the engine replaced. A model from `init_with` keeps the parts given there."""
    if isinstance(optimizer, StreamedOptimizer) or any(host.training is not None for host in _stores(model)):
        raise UsageError(
            "this model, or another one from the same zi.init, is prepared already\n"
            "  fix:   call zi.prepare once for each model, with a plain optimizer; one zi.init for each model"
        )
    config = config or Config()
    place = accelerator or _find_accelerator()
    replicas = find_group(activation_group) if activation_group is not None else None
    ranks = find_group(group, parts.make_traffic)
    engine = TrainingEngine(model, optimizer, config, place, ranks, replicas, parts)
    if place is not None:
        for tensor in (*model.buffers(), *(p for p in model.parameters() if managed(p) is None)):
            tensor.data = tensor.data.to(place.device)
    return model, StreamedOptimizer(engine, optimizer)


def init(
    config: Config | None = None, *, group: ProcessGroup | DeviceMesh | None = None
) -> AbstractContextManager[None]:
    """Inside, models are built with their parameters on the tiers of `config`: they never exist whole in memory.

    Values are those of a plain construction with the same seed. Give the same config to `prepare` afterwards.
    Of the ranks of `group` (or of the default group) each keeps its part; all have to seed alike.
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
    """Inside, these parameters have their values in memory; what is changed is kept.

    With `update="after_backward"` their accumulated gradients are there as `.grad` between backward and step.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    elif isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    by_host: dict[ParameterStore, list[ManagedParameter]] = {}
    for parameter in parameters:
        known = managed(parameter)
        if known is not None:
            by_host.setdefault(store_of(known), []).append(known)
    with ExitStack() as stack:
        for host, members in by_host.items():
            stack.enter_context(host.gathered(members))
        yield


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for prepared models: between backward and step, with update="after_backward".

    Returns the norm before clipping. `max_grad_norm` in the config does the same without a call.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    engines = {store_of(known).training for p in listed if (known := managed(p)) is not None}
    engine = engines.pop() if len(engines) == 1 else None
    if engine is None:
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
    """Save a prepared model between two steps, as a new checkpoint in the directory `path`; returns its folder.

    With the optimizer: its states and settings, the number of steps, the loss scale and the random states, for training
    to go on exactly. `extra`: what else it needs: numbers, texts, lists, dicts, small tensors, and objects with a
    `state_dict` (schedulers, data loaders). `keep`: remove all but the newest so many checkpoints in `path` afterwards.
    `background`: return as soon as this moment is kept, and write it while training goes on; `zi.synchronize`, the next
    save or load, and the end of the process wait for it, and raise what went wrong (the end only warns).
    `progress`: called with the bytes that this rank has written so far and all that it will write, by any thread.
    On several ranks: all of them call it, with a path that all of them see.
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
    """Load the checkpoint `path`, or the latest one in it, into a prepared model; returns what was saved as `extra`.

    Ranks, stage, memory, drives and dtypes may be others than when it was saved. Objects in `extra` that have a
    `load_state_dict` get their states. Without the optimizer only parameters and buffers are loaded. `progress` as in
    `zi.save`.
    """
    engine = _engine_of_both(model, optimizer)
    loading = CheckpointLoad(model, engine, with_optimizer=optimizer is not None, strict=strict)
    return loading.read(Path(path), extra or {}, progress)


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: Progress | None = None
) -> None:
    """Load the weights of a safetensors file, or of a Hugging Face folder, into a model of `zi.init` or `zi.prepare`.

    They are never whole in memory: each rank reads what it keeps, in the dtype that it keeps. Names and fused weights
    are converted as `from_pretrained` of transformers does. Master copies are set, the optimizer's states stay as they
    are. Inside of `zi.init`, too, once the model is made. `progress` as in `zi.save`.
    """
    hosts = _stores(model)
    if len(hosts) != 1:
        raise UsageError(
            "this model was neither prepared nor built inside of zi.init\n"
            "  fix:   zi.prepare(model, optimizer, config) first; or from_pretrained, if it fits in memory"
        )
    training = hosts[0].training
    view = training if isinstance(training, TrainingEngine) else UnpreparedModel(model, hosts[0])
    PretrainedLoad(model, view, strict=strict).read(Path(path), progress)


def export(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a prepared model's weights to a new folder, as `from_pretrained` of transformers reads them.

    Safetensors files, with the config of a Hugging Face model. `dtype`: of floating-point weights; else they are
    written with all the bits that there are. On several ranks: all of them call it. `progress` as in `zi.save`, for
    what this rank puts aside; and once more, from 0, on the first rank, which makes the files out of it.
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
    """Wait until every update that was submitted is done and no byte is on its way, a save in the background included.

    Raises what went wrong.

    Nothing needs it to be right: whoever reads a parameter waits for its update. It is for measuring, and for the end
    of a run. When the config has a `trace`, its file is written, too.
    """
    engine = engine_of(model)
    engine.settle()
    engine.background_save.wait()
    engine.write_trace()


def stats(model: nn.Module) -> Stats:
    """What the engine of a prepared model holds and has done so far."""
    return engine_of(model).stats()


def close(model: nn.Module) -> None:
    """Give a prepared model's memory, files and connections back now, and not when it is collected. Its values go.

    On several ranks: on all of them, after `synchronize`.
    """
    engine_of(model).host.close()


def engine_of(model: nn.Module) -> TrainingEngine:
    """The engine of a prepared model."""
    for host in _stores(model):
        if isinstance(host.training, TrainingEngine):
            return host.training
    raise UsageError("this model is not prepared\n  fix:   zi.prepare(model, optimizer, config)")


def _stores(model: nn.Module) -> list[ParameterStore]:
    known = (managed(parameter) for parameter in model.parameters())
    return list(dict.fromkeys(store_of(m) for m in known if m is not None))


def _find_accelerator() -> ComputeDevice | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return TorchAccelerator(device) if device is not None else None
