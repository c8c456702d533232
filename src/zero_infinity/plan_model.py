"""`zi.plan`: what `zi.prepare` would do with a model, an optimizer and a config, on any machine. Moves nothing.

Owns the way from a real model to the planner's: its units and optimizer records are the engine's own, its operators are
counted in one forward pass without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity._torch import FakeTensorMode, tree_map
from zero_infinity.activations.block_finder import repeated_blocks
from zero_infinity.block_timing import BlockCall, find_call, time_block
from zero_infinity.config import Config
from zero_infinity.errors import UsageError
from zero_infinity.model_layout import lay_out_units
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.environment import TrainingEnvironment
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import Unit
from zero_infinity.planner import hardware as profiles
from zero_infinity.planner import module_shapes
from zero_infinity.planner.calibration import calibrated
from zero_infinity.planner.hardware import Hardware, TierKind
from zero_infinity.planner.model_shapes import ModelShape
from zero_infinity.planner.plan import Plan, make_plan
from zero_infinity.planner.training_job import TrainingJob, Workload
from zero_infinity.planner.unit_states import StateBytes, UnitStates, WholeParameter, frozen, update_bytes
from zero_infinity.policy.alignment import round_up_elements
from zero_infinity.policy.partition import ONE_RANK, Span

_UNLIMITED = 1 << 62


def plan(
    model: nn.Module,
    optimizer: Optimizer,
    config: Config | None = None,
    *,
    hardware: str | Hardware,
    inputs: Mapping[str, Any],
    devices: int | None = None,
    nodes: int = 1,
    calibrate: bool = False,
) -> Plan:
    """Plan the training of a model, which may be on the meta device, without moving anything.

    Args:
        model: Any model, with the `requires_grad` flags that it will be trained with.
        optimizer: The optimizer that `zi.prepare` would get.
        config: As for `zi.prepare`. Without `nvme` the drives of `hardware` are not used.
        hardware: The name of a profile, the path of one, or a `Hardware`.
        inputs: Keyword arguments of one forward pass, of one micro-batch: only their shapes and dtypes count. The first
            dimension of the first tensor is the batch; the second, if it has integers, the sequence.
        devices: Devices per node. Default: all of the profile.
        nodes: Number of nodes.
        calibrate: Run one repeated block on this machine's CPU, which `hardware` describes, and scale times to it.

    Raises `CapacityError` if it does not fit.
    """
    config = config if config is not None else Config()
    if any(managed(parameter) is not None for parameter in model.parameters()):
        raise UsageError("zi.plan is for a model that is not prepared yet\n  fix:   zi.plan before zi.prepare")
    machine = profiles.load(hardware) if isinstance(hardware, str) else hardware
    if not config.nvme:
        machine = replace(machine, tiers=tuple(t for t in machine.tiers if t.kind is not TierKind.STORAGE))
    elif not machine.storage:
        raise UsageError(f"config has nvme, but {machine.name} has no drive\n  fix:   leave out nvme, or add a tier")
    if devices is not None:
        machine = machine.with_devices(devices)
    shape, call = _shape(model, inputs, calls=calibrate)
    shape = shape.with_states(_states(model, optimizer, config))
    job = _job(config, machine, _batch(inputs), devices, nodes, _stored_bytes(model))
    if call is not None:
        times = time_block(call)
        shape = calibrated(Workload(shape, machine, job), times.forward, times.backward)
    return make_plan(shape, machine, job)


def _job(
    config: Config, machine: Hardware, batch: int, devices: int | None, nodes: int, parameter_bytes: int
) -> TrainingJob:
    num_devices = devices or machine.devices_per_node
    # With a drive in the settings, every state is at home there, also when all of it fits in memory.
    home = machine.storage[0].name if config.nvme else None
    computed = {"float32": 4, "bfloat16": 2, "float16": 2}.get(config.compute_dtype or config.param_dtype or "")
    return TrainingJob(
        batch=batch,
        num_nodes=nodes,
        devices_per_node=devices,
        accumulation=config.gradient_accumulation_steps,
        stage=config.stage,
        clips=config.max_grad_norm is not None,
        activation_bytes=computed or parameter_bytes,
        memory=config.memory * num_devices if config.memory is not None else None,
        device_memory=config.device_memory if machine.device is not None else None,
        interval=int(config.checkpoint_activations),
        offload_checkpoints=True if config.offload_activations else None,
        early_update=config.update == "auto" and config.param_dtype != "float16",
        parameters_on=home,
        optimizer_on=home,
    )


def _stored_bytes(model: nn.Module) -> int:
    return max((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4)


def _states(model: nn.Module, optimizer: Optimizer, config: Config) -> dict[str, UnitStates]:
    """The states of each unit, by the name of its module: as the engine would make them on one rank."""
    environment = TrainingEnvironment(config, None, ONE_RANK, None, _UNLIMITED, _UNLIMITED, None)
    units, records = lay_out_units(model, optimizer, environment)
    root = type(model).__name__
    return {"" if unit.name == root else unit.name: _states_of(unit, records.get(unit)) for unit in units}


def _states_of(unit: Unit, record: StateRecord | None) -> UnitStates:
    if record is None:
        return frozen(unit.dtype.itemsize)
    widths = record.widths
    update = update_bytes(widths, has_master=record.has_master)
    wholes = record.whole_sizes(Span(0, unit.num_elements))
    return UnitStates(
        StateBytes(widths.parameter, widths.record, widths.gradient, update),
        trained=sum(round_up_elements(p.num_elements) for p in record.state_names if p not in wholes),
        wholes=tuple(WholeParameter(round_up_elements(p.num_elements), size) for p, size in wholes.items()),
    )


def _shape(model: nn.Module, inputs: Mapping[str, Any], *, calls: bool) -> tuple[ModelShape, BlockCall | None]:
    """Run a copy of the model that has no memory; also how its first block is called, if `calls`."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        clone = _without_memory(model)
        blocks, arguments = repeated_blocks(clone), tree_map(_empty_like, dict(inputs))
        shape = module_shapes.describe(
            clone,
            arguments,
            batch=_batch(inputs),
            seq=_seq(inputs),
            name=type(model).__name__,
            dtype_bytes=_stored_bytes(model),
            blocks=blocks,
        )
        if calls and not blocks:
            raise UsageError(
                f"{type(model).__name__} has no repeated blocks to time\n  fix:   leave out calibrate=True"
            )
        return shape, find_call(clone, blocks[0], arguments) if calls else None


def _without_memory(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_empty_like(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _empty_like(buffer)
    return copy.deepcopy(model, memo)


def _empty_like(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _first(inputs: Mapping[str, Any]) -> torch.Tensor:
    found = next((value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()), None)
    if found is None:
        raise UsageError("zi.plan: inputs has no tensor\n  fix:   the keyword arguments of one forward pass")
    return found


def _batch(inputs: Mapping[str, Any]) -> int:
    return _first(inputs).shape[0]


def _seq(inputs: Mapping[str, Any]) -> int:
    first = _first(inputs)
    return first.shape[1] if first.dim() == 2 and not first.is_floating_point() else 1
