"""Which tier each kind of state lives on: by the paper's rule or by the engine's. Pure.

The paper's (ZeRO-Infinity, section 7.1) offloads as little as possible. Sizes and capacities in, tiers out.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind


@dataclass(frozen=True, slots=True)
class StateNeed:
    """Bytes on the whole cluster by kind of state, and the activations that every device needs while it computes."""

    parameters: int
    optimizer: int  # with gradients that are kept until the step
    checkpoints: int
    working_per_device: int


@dataclass(frozen=True, slots=True)
class HomeTiers:
    """The tier that each kind of state lives on."""

    parameters: HardwareTier
    optimizer: HardwareTier
    checkpoints: HardwareTier


def capacity(tier: HardwareTier, hardware: Hardware, num_nodes: int) -> int:
    """Bytes of a tier over the whole cluster."""
    each = hardware.devices_per_node if tier.kind is TierKind.DEVICE else 1
    return tier.capacity * each * num_nodes


def choose_homes(need: StateNeed, hardware: Hardware, num_nodes: int, host_memory: int) -> HomeTiers:
    """Each kind on the fastest tier with room, in the paper's order: optimizer, then checkpoints, then parameters.

    When everything fits in device memory nothing is offloaded. Otherwise the optimizer's states (the largest, and used
    once a step) leave it first. If parameters or checkpoints can stay, parameters do; if both must go, checkpoints are
    placed first, because their traffic per computation is less. `host_memory` is what a node gives to states;
    checkpoints may have the rest as well. `CapacityError` when even the last tier is too small.
    """
    room = {tier: capacity(tier, hardware, num_nodes) for tier in hardware.tiers}
    device, host = hardware.device, hardware.host
    num_computing = num_nodes * (hardware.devices_per_node if device is not None else 1)
    room[device or host] -= need.working_per_device * num_computing
    if device is not None and need.parameters + need.optimizer + need.checkpoints <= room[device]:
        return HomeTiers(device, device, device)
    not_for_states = room[host] - min(room[host], host_memory * num_nodes)
    room[host] -= not_for_states
    # Device memory is kept for what every operator needs.
    below = [tier for tier in hardware.tiers if tier is not device]
    optimizer = _place("optimizer states", need.optimizer, below, room)
    if device is not None and need.parameters + need.checkpoints <= room[device]:
        return HomeTiers(device, optimizer, device)
    parameters_stay = device is not None and need.parameters <= room[device]
    room[host] += not_for_states
    checkpoints = _place("activation checkpoints", need.checkpoints, below, room)
    if device is not None and parameters_stay:
        return HomeTiers(device, optimizer, checkpoints)
    room[host] -= max(0, not_for_states - (need.checkpoints if checkpoints is host else 0))
    return HomeTiers(_place("parameters", need.parameters, list(hardware.tiers), room), optimizer, checkpoints)


def slowest_homes(need: StateNeed, hardware: Hardware, num_nodes: int, host_memory: int) -> HomeTiers:
    """As the engine does it: all states on the host, or, if they do not fit, all of them on the next tier with room.

    Device memory is only a cache. Checkpoints stay on the device that made them as long as it has room.
    """
    room = {tier: capacity(tier, hardware, num_nodes) for tier in hardware.tiers}
    device, host = hardware.device, hardware.host
    not_for_states = room[host] - min(room[host], host_memory * num_nodes)
    room[host] -= not_for_states
    below = [tier for tier in hardware.tiers if tier is not device]
    home = _place("parameters and optimizer states", need.parameters + need.optimizer, below, room)
    room[host] += not_for_states
    if device is not None:
        room[device] -= need.working_per_device * hardware.devices_per_node * num_nodes
        # Half of what is left is enough to gather parameters in.
        if need.checkpoints <= room[device] // 2:
            return HomeTiers(home, home, device)
    return HomeTiers(home, home, _place("activation checkpoints", need.checkpoints, below, room))


def _place(what: str, num_bytes: int, tiers: list[HardwareTier], room: dict[HardwareTier, int]) -> HardwareTier:
    for tier in tiers:
        if num_bytes <= room[tier]:
            room[tier] -= num_bytes
            return tier
    largest = max(tiers, key=lambda tier: room[tier])
    raise CapacityError(
        f"{what} take {format_bytes(num_bytes)}, but {largest.name} has only {format_bytes(max(0, room[largest]))} "
        "left, and no other tier has more\n"
        "  fix:   more nodes, a smaller model or batch, or a tier with more room"
    )
