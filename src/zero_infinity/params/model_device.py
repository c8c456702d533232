"""Which device computes a model, and the model's tensors that are not offloaded."""

from __future__ import annotations

import torch
from torch import nn

from zero_infinity._torch import HAS_COMPATIBLE_TYPE
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.errors import UsageError
from zero_infinity.params.offloaded_param import managed, replace_by
from zero_infinity.params.packed_tensor import PackedTensor
from zero_infinity.policy.device_room import planned_budget
from zero_infinity.tiers.compute_device import ComputeDevice
from zero_infinity.tiers.torch_accelerator import TorchAccelerator, indexed


def find_accelerator(
    model: nn.Module, device: torch.device | str | ComputeDevice | None, config: Config, ranks: RankGroup | None
) -> ComputeDevice | None:
    """Return the accelerator that computes the model; None: the CPU does. The same kind of device on every rank."""
    if device is not None and not isinstance(device, str | torch.device):
        return device
    chosen = indexed(torch.device(device) if device is not None else _device_of(model))
    if ranks is not None:
        ranks.phases.all_same(
            "the device to compute on", chosen.type, "start every rank with a device, or none: device=..."
        )
    if chosen.type == "cpu":
        return None
    # Asked once: what is free changes. Ranks must decide alike which layers are gathered when.
    budget = config.device_memory or planned_budget(torch.accelerator.get_memory_info(chosen)[0])
    if ranks is not None:
        budget = ranks.phases.smallest("the device memory of zi.prepare", budget)
    return TorchAccelerator(chosen, budget, is_measured=config.device_memory is None)


def _device_of(model: nn.Module) -> torch.device:
    """Return the accelerator that the model is on; for a model on the CPU the current one, if there is any."""
    named = (*model.named_parameters(), *model.named_buffers())
    places = {tensor.device: name for name, tensor in named if tensor.device.type not in ("cpu", "meta")}
    if len(places) > 1:
        (first, one), (second, other) = list(places.items())[:2]
        raise UsageError(
            f"the model is on several devices: {one!r} on {first}, {other!r} on {second}\n"
            "  fix:   model.to(one device), or leave it on the CPU; zi.prepare moves layers when they are needed"
        )
    if places:
        return next(iter(places))
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None else torch.device("cpu")


def move_unmanaged(model: nn.Module, device: torch.device) -> None:
    """Move buffers, and parameters that are trained in place, to `device`."""
    moved: dict[torch.Tensor, torch.Tensor] = {}  # one buffer may be registered in several modules
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device and not isinstance(buffer, PackedTensor):
                setattr(module, name, moved.setdefault(buffer, buffer.to(device)))
    for parameter in model.parameters():
        if managed(parameter) is None and parameter.device != device and not isinstance(parameter, PackedTensor):
            data = parameter.detach().to(device)
            if HAS_COMPATIBLE_TYPE(parameter, data):
                parameter.data = data
            else:
                replace_by(parameter, data)
