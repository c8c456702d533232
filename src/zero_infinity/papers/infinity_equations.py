"""ZeRO-Infinity's memory equations (arXiv 2104.07857, section 3), and the largest model of each strategy. Pure.

A Transformer of `layers` blocks of width `hidden`: four linear layers of (h,3h), (h,h), (h,4h) and (4h,h), without
embeddings. Its figure 2a counts in powers of 1024. The largest models (table 2, figures 1 and 6a) are bounds by model
states alone: activations, working memory and fragmentation take their part in reality.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zero_infinity.planner.hardware import Hardware

# 16-bit parameter and gradient, and in float32 momentum, variance, parameter and gradient. ZeRO's 16 bytes do without
# the float32 gradient.
STATE_BYTES = 20
HALF_BYTES = 2
_REST_BYTES = STATE_BYTES - HALF_BYTES  # gradients and optimizer states


@dataclass(frozen=True, slots=True)
class Transformer:
    """The numbers that the equations are about. `interval` is ci: blocks between two activation checkpoints."""

    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    interval: int = 1

    @property
    def num_parameters(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """240 x layers x hidden^2."""
        return STATE_BYTES * self.num_parameters

    def checkpoint_bytes(self, batch: float) -> float:
        """2 x batch x seq x hidden x layers / interval: one 16-bit tensor for each interval."""
        return HALF_BYTES * batch * self.seq * self.hidden * self.layers / self.interval

    def activation_bytes(self, batch: float) -> float:
        """All activations, when nothing is computed again: `layers` times the working memory of one block."""
        return self.layers * self._block_activation_bytes(batch)

    def activation_working_bytes(self, batch: float) -> float:
        """AWM: batch x seq x interval x (16 x hidden + 2 x heads x seq), many tensors."""
        return self.interval * self._block_activation_bytes(batch)

    @property
    def state_working_bytes(self) -> int:
        """MSWM: 16-bit parameter and gradient of the h -> 4h layer, each in one piece."""
        return 2 * HALF_BYTES * self.hidden * 4 * self.hidden

    def _block_activation_bytes(self, batch: float) -> float:
        return batch * self.seq * (16 * self.hidden + 2 * self.heads * self.seq)


def largest_hidden(chunk_bytes: int, tiles: int, *, with_gradient: bool) -> int:
    """The widest h -> 4h layer whose tiles fit in contiguous memory of `chunk_bytes` (figure 6b), a power of two.

    The text does not say whether weight and gradient share a chunk; both readings are possible.
    """
    tensor_bytes = HALF_BYTES * (2 if with_gradient else 1)
    hidden = 1
    while tensor_bytes * 4 * (2 * hidden) ** 2 <= chunk_bytes * tiles:
        hidden *= 2
    return hidden


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
        return device / (HALF_BYTES + _REST_BYTES / num_devices)
    if strategy is Strategy.ZERO_OFFLOAD:
        # Every device holds all parameters; what else it has room for helps the host.
        with_host = (num_devices * device + host) / (num_devices * HALF_BYTES + _REST_BYTES)
        return min(device / HALF_BYTES, with_host)
    if strategy in (Strategy.ZERO_3, Strategy.THREE_D):
        return num_devices * device / STATE_BYTES
    below = host + (storage if strategy is Strategy.INFINITY_NVME else 0)
    return (num_devices * device + below) / STATE_BYTES
