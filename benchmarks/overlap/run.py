"""The settings of one run of `overlap`, which its command and its ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Run:
    """What one run trains, and on which links."""

    layers: int
    width: int
    kernel_seconds: float
    device_share: float  # of the parameters, in device memory
    steps: int
    transfer_share: float  # of the kernels of a plain step, that one rank's busier direction takes
    prefetch: bool = True
    partition: Literal["spread", "owner"] = "spread"
