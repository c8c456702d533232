"""Where states live (ZeRO-Infinity, section 7.1): offload only what must be, the optimizer first, to the fastest tier.

Pure: sizes and capacities in, homes out. A *home* is a position in the hardware's list of tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_infinity.errors import CapacityError
from zero_infinity.plan.hardware import Hardware, Tier, TierKind
from zero_infinity.units import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes over the whole cluster, by kind. Working memory is what every device needs while it computes."""

    parameters: int
    optimizer: int  # with the gradients that are kept for it
    checkpoints: int
    working_per_device: int


@dataclass(frozen=True, slots=True)
class Homes:
    """The tier that each kind of state lives on."""

    parameters: Tier
    optimizer: Tier
    checkpoints: Tier


def capacity(tier: Tier, hardware: Hardware, num_nodes: int) -> int:
    """Bytes of a tier over the whole cluster."""
    each = hardware.devices_per_node if tier.kind is TierKind.DEVICE else 1
    return tier.capacity * each * num_nodes


def choose_homes(need: Need, hardware: Hardware, num_nodes: int, *, host_reserved: int = 0) -> Homes:
    """Each kind on the fastest tier with room, in the paper's order: optimizer, then checkpoints, then parameters.

    When everything fits in device memory nothing is offloaded. Otherwise the optimizer's states (the largest, and used
    once a step) leave it first; checkpoints go before parameters because their traffic per computation is less.
    `host_reserved` is kept free on every node, for buffers. `CapacityError` when even the last tier is too small.
    """
    room = {tier: capacity(tier, hardware, num_nodes) for tier in hardware.tiers}
    device = hardware.device
    if device is not None:
        room[device] -= need.working_per_device * hardware.devices_per_node * num_nodes
        if need.parameters + need.optimizer + need.checkpoints <= room[device]:
            return Homes(device, device, device)
    else:
        room[hardware.host] -= need.working_per_device * num_nodes
    room[hardware.host] -= host_reserved * num_nodes
    # Device memory is kept for parameters and checkpoints; a machine without devices has none to keep.
    below = [tier for tier in hardware.tiers if tier is not device]
    optimizer = _place("optimizer states", need.optimizer, below, room)
    upper = list(hardware.tiers)
    if device is not None and need.parameters + need.checkpoints <= room[device]:
        return Homes(device, optimizer, device)
    if device is not None and need.parameters <= room[device]:
        return Homes(device, optimizer, _place("activation checkpoints", need.checkpoints, below, room))
    checkpoints = _place("activation checkpoints", need.checkpoints, upper if need.checkpoints == 0 else below, room)
    parameters = _place("parameters", need.parameters, upper, room)
    return Homes(parameters, optimizer, checkpoints)


def _place(what: str, num_bytes: int, tiers: list[Tier], room: dict[Tier, int]) -> Tier:
    for tier in tiers:
        if num_bytes <= room[tier]:
            room[tier] -= num_bytes
            return tier
    largest = max(tiers, key=lambda tier: room[tier])
    raise CapacityError(
        f"{what} take {format_bytes(num_bytes)}, but {largest.name} has only {format_bytes(max(0, room[largest]))} left, "
        "and no other tier has more\n"
        "  fix:   more nodes, a smaller model or batch, or a tier with more room"
    )
