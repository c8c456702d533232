"""The largest model that each way to train fits (ZeRO-Infinity, table 2 and figures 1, 6a).

Bounds by model states alone: activations, working memory and fragmentation take their part in reality. Pure.
"""

from __future__ import annotations

import enum

from zero_infinity.papers.infinity_equations import STATE_BYTES
from zero_infinity.planner.hardware import Hardware

_PARAMETER_BYTES = 2
_REST_BYTES = STATE_BYTES - _PARAMETER_BYTES  # gradients and optimizer states


class Strategy(enum.StrEnum):
    DATA_PARALLEL = "data parallel"
    ZERO_2 = "ZeRO-2"
    ZERO_OFFLOAD = "ZeRO-Offload"
    ZERO_3 = "ZeRO-3"
    THREE_D = "3D parallelism"
    INFINITY_CPU = "ZeRO-Infinity, CPU"
    INFINITY_NVME = "ZeRO-Infinity, NVMe"

    @property
    def placement(self) -> tuple[str, str]:
        """Where optimizer states with gradients, and where parameters live."""
        return _PLACEMENTS[self]


_PLACEMENTS = {
    Strategy.DATA_PARALLEL: ("GPU, a copy each", "GPU, a copy each"),
    Strategy.ZERO_2: ("GPU, split", "GPU, a copy each"),
    Strategy.ZERO_OFFLOAD: ("CPU and GPU, split", "GPU, a copy each"),
    Strategy.ZERO_3: ("GPU, split", "GPU, split"),
    Strategy.THREE_D: ("GPU, split", "GPU, split"),
    Strategy.INFINITY_CPU: ("CPU and GPU, split", "CPU and GPU, split"),
    Strategy.INFINITY_NVME: ("NVMe, CPU and GPU, split", "NVMe, CPU and GPU, split"),
}


def largest_model(strategy: Strategy, hardware: Hardware, num_nodes: int = 1) -> float:
    """Parameters whose states fit, at 20 bytes each."""
    num_devices = num_nodes * hardware.devices_per_node
    device = hardware.device.capacity if hardware.device is not None else 0
    host = num_nodes * hardware.host.capacity
    storage = num_nodes * sum(tier.capacity for tier in hardware.storage)
    if strategy is Strategy.DATA_PARALLEL:
        return device / STATE_BYTES
    if strategy is Strategy.ZERO_2:
        return device / (_PARAMETER_BYTES + _REST_BYTES / num_devices)
    if strategy is Strategy.ZERO_OFFLOAD:
        # Every device holds all parameters; what else it has room for helps the host.
        with_host = (num_devices * device + host) / (num_devices * _PARAMETER_BYTES + _REST_BYTES)
        return min(device / _PARAMETER_BYTES, with_host)
    if strategy in (Strategy.ZERO_3, Strategy.THREE_D):
        return num_devices * device / STATE_BYTES
    below = host + (storage if strategy is Strategy.INFINITY_NVME else 0)
    return (num_devices * device + below) / STATE_BYTES
