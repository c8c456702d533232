"""The view of a model built by `zi.init` that is not prepared yet: parameters in blocks, and no training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from zero_infinity.checkpoint.background_save import BackgroundSave
from zero_infinity.comm.channel import Channel
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.optim.state_records import StateRecord
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unit import Unit
from zero_infinity.params.unshard import Unsharder
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.tiers.host_cache import HostCache

# Staging memory: this fraction of the budget, up to a size beyond which it is of no use.
_STAGING_FRACTION, _MAX_STAGING_BYTES = 16, 16 << 20


class UnpreparedModel:
    """Implements `WeightsView`."""

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

    @contextmanager
    def staging(self) -> Iterator[int]:
        """Memory is taken from the host cache meanwhile."""
        host_cache, pool, policy = self.host_cache, self.store.pool, self.host_cache.policy
        num_bytes = max(0, min(_MAX_STAGING_BYTES, pool.budget // _STAGING_FRACTION, policy.budget // 2))
        host_cache.limit(policy.budget - num_bytes, policy.lookahead)
        pool.charge(num_bytes)
        try:
            yield num_bytes
        finally:
            pool.discharge(num_bytes)
            host_cache.limit(policy.budget + num_bytes, policy.lookahead)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        known = (managed(parameter) for parameter in self._model.parameters())
        units = dict.fromkeys(part.unit for m in known if m is not None for part in m.parts)
        for unit in units:
            self._sources.of(unit).updated(unit)
        yield
        for source in {self._sources.of(unit) for unit in units}:
            source.end_cycle(same_order=False)
