"""What checkpoints need of a model that trains: the seam between this package and the engine.

`TrainingView` is implemented by the engine. `WeightsView` is its part that also exists while a model is still being
built (`UnpreparedModel`); loading pretrained weights needs no more. Nothing else of the engine is used in this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch.optim import Optimizer

from zero_infinity.checkpoint.background_save import BackgroundSave
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.unit import Unit
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.host_cache import HostCache


class WeightsView(Protocol):
    """A model's parameters in blocks."""

    @property
    def ranks(self) -> RankGroup | None: ...

    @property
    def step_channel(self) -> Channel | None:
        """To the other ranks, for the computing thread; None while the model is being built."""

    @property
    def units(self) -> Sequence[Unit]:
        """Units of the prepared model. Empty while the model is being built."""

    @property
    def records(self) -> Mapping[Unit, StateRecord]:
        """Optimizer states, by unit."""

    @property
    def store(self) -> BlockStore: ...

    @property
    def host_cache(self) -> HostCache: ...

    @property
    def background_save(self) -> BackgroundSave: ...

    def staging(self) -> AbstractContextManager[int]:
        """Bytes within the memory budget that checkpoint I/O may use inside, between two steps."""

    def replacing(self) -> AbstractContextManager[None]:
        """Inside, all values are replaced; an error leaves the model unusable until the next successful load."""


class TrainingView(WeightsView, Protocol):
    """A prepared model with its optimizer."""

    @property
    def user_optimizer(self) -> Optimizer: ...

    @property
    def state_io(self) -> OptimizerStateIO: ...

    @property
    def loss_scale(self) -> LossScale | None: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def verify(self) -> bool:
        """True if blocks that come back from a drive are compared with their checksums."""

    @property
    def spare_bytes(self) -> int:
        """Bytes of the host cache that training can do without."""

    def rest(self) -> None:
        """Finish all work in progress, so that every block holds its final values. Between two steps only."""

    def go_on_from(self, num_steps: int) -> None:
        """Set the number of steps taken."""
