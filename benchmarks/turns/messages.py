"""What a contender's process is told and answers: one JSON object a line over its pipes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zero_infinity.models.presets import Shape

STATE_BYTES = 12  # a parameter: its value and AdamW's two states, all fp32


@dataclass(frozen=True, slots=True)
class Race:
    """What every contender trains, alike."""

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    seed: int
    lr: float
    num_steps: int

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.hidden, self.heads, self.seq)

    @property
    def state_bytes(self) -> int:
        return STATE_BYTES * self.shape.num_parameters


@dataclass(frozen=True, slots=True)
class Setting:
    """What one contender does differently. Without `memory` it is plain PyTorch."""

    name: str
    memory: int | None = None
    nvme: str | None = None  # a directory; None: the states stay in RAM
    fraction: float | None = None  # of the states that `memory` is, where that was asked for
    # For ablations and growth: further settings, parts of the engine that are left out (engine_variants), the speed of
    # emulated links, how many ranks share the batch, and the memory of an emulated device.
    options: Mapping[str, object] = field(default_factory=dict)
    without: Sequence[str] = ()
    bytes_per_second: float | None = None
    ranks: int = 1
    device_memory: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.memory is None


@dataclass(frozen=True, slots=True)
class StartReport:
    """What a contender says when it can take its first step."""

    num_parameters: int
    weight_bytes: int
    build_seconds: float  # making the model; with the engine straight into its tiers
    prepare_seconds: float  # zi.prepare; nothing for plain PyTorch
    torch: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, as its contender measured it."""

    seconds: float
    cpu_seconds: float  # of all its threads
    waited_seconds: float
    drain_seconds: float  # the part of `seconds` after step(), for updates that were still under way
    bytes_read: int
    bytes_written: int
    others_cpu_seconds: float  # what the machine did for others meanwhile
    loss: float


@dataclass(frozen=True, slots=True)
class FinishReport:
    """What a contender says at the end."""

    peak_rss: int
    memory_peak: int  # held by the engine; 0 for plain PyTorch
    num_deviations: int
    weights: str  # checksum of every parameter's final bits
