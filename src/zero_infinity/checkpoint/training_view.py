"""What checkpoints need of a model that trains: the seam between this package and the engine.

`TrainingView` is implemented by the engine. `WeightsView` is its part that also exists while a model is still being
built (`UnpreparedModel`); loading pretrained weights needs no more. This package uses nothing else of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.checkpoint.save_thread import BackgroundSave
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.optim.optimizer_state_io import OptimizerStateIO
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import Unit
from zero_infinity.params.unshard import Unsharder
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.host_cache import HostCache, SpareBytes

# Staging memory: this fraction of the budget, up to a size beyond which it is of no use.
_STAGING_FRACTION, _MAX_STAGING_BYTES = 16, 16 << 20


class WeightsView(Protocol):
    """A model's parameters in blocks."""

    @property
    def ranks(self) -> RankGroup | None: ...

    @property
    def step_channel(self) -> Channel | None:
        """To the other ranks, for the compute thread; None while the model is being built."""

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
    def device(self) -> torch.device:
        """Where the model computes."""

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


@contextmanager
def borrowed_staging(host_cache: HostCache, spare: SpareBytes) -> Iterator[int]:
    """Take staging memory from what no block needs, and the rest from the host cache."""
    pool, policy = host_cache.store.pool, host_cache.policy
    most = min(_MAX_STAGING_BYTES, pool.budget // _STAGING_FRACTION)
    unused = min(max(0, spare.num_bytes), most)
    lent = max(0, min(most - unused, policy.budget // 2))
    spare.num_bytes -= unused
    host_cache.limit(policy.budget - lent, policy.lookahead)
    pool.charge(unused + lent)
    try:
        yield unused + lent
    finally:
        pool.discharge(unused + lent)
        host_cache.limit(policy.budget + lent, policy.lookahead)
        spare.num_bytes += unused


class UnpreparedModel:
    """The `WeightsView` of a model built by `zi.init` that is not prepared yet: no records, no channel, no training."""

    def __init__(self, model: nn.Module, unsharder: Unsharder) -> None:
        parameters = unsharder.owner.parameter_store
        self._sources = unsharder.access.sources
        self._model = model
        self.ranks: RankGroup | None = parameters.ranks
        self.step_channel: Channel | None = None
        # There may also be units of parameters that were replaced (tied) meanwhile, which are not in the model.
        self.units: list[Unit] = []
        self.records: dict[Unit, StateRecord] = {}
        self.store: BlockStore = parameters.store
        self.host_cache: HostCache = parameters.host_cache
        self.background_save = BackgroundSave(None)

    def staging(self) -> AbstractContextManager[int]:
        """Memory is taken from the host cache meanwhile."""
        return borrowed_staging(self.host_cache, SpareBytes(0))

    @contextmanager
    def replacing(self) -> Iterator[None]:
        known = (managed(parameter) for parameter in self._model.parameters())
        units = dict.fromkeys(part.unit for m in known if m is not None for part in m.parts)
        for unit in units:
            self._sources.of(unit).updated(unit)
        yield
        for source in {self._sources.of(unit) for unit in units}:
            source.end_cycle(same_order=False)
