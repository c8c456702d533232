"""Submits a unit's work to the update worker: an update, or gradients to retain.

The blocks of a job are accessed, and so fetched, in the order in which the job will use them, and held until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from zero_infinity.optim.chunk_update import FreshGradients, RetainGradients, UnitUpdate
from zero_infinity.optim.state_records import Segment, StateRecord
from zero_infinity.optim.update_rule import UpdateRule, hyperparameters_of
from zero_infinity.params.unit import ManagedParameter, Unit
from zero_infinity.params.unit_values import ValueSources
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.update_worker import UpdateWorker


class UpdateSubmission:
    """The jobs of one model's optimizer."""

    def __init__(
        self,
        host_cache: HostCache,
        update_worker: UpdateWorker,
        sources: ValueSources,
        optimizer: Optimizer,
        records: Mapping[Unit, StateRecord],
        *,
        is_shared: bool,
        on_all_cores: bool = False,
    ) -> None:
        """`is_shared`: the compute thread may run updates as well. `on_all_cores`: the update worker may use them all,
        as many as the thread that submits."""
        self._host_cache = host_cache
        self._update_worker = update_worker
        self._sources = sources
        self._optimizer = optimizer
        self._rule = UpdateRule(optimizer)
        self._records = records
        self._is_shared = is_shared
        self._on_all_cores = on_all_cores

    def update(
        self,
        unit: Unit,
        fresh: FreshGradients,
        parameters: Iterable[ManagedParameter],
        retained: Sequence[ManagedParameter],
        factors: tuple[torch.Tensor, ...],
        done: Callable[[], None],
        *,
        keeps_gradients: bool,
    ) -> UnitUpdate:
        """Update these parameters of a unit with their fresh gradients and those of `retained`, which may be kept."""
        job = self.decide(unit, fresh, parameters, retained, factors, done, keeps_gradients=keeps_gradients)
        self.submit(job)
        return job

    def decide(
        self,
        unit: Unit,
        fresh: FreshGradients,
        parameters: Iterable[ManagedParameter],
        retained: Sequence[ManagedParameter],
        factors: tuple[torch.Tensor, ...],
        done: Callable[[], None],
        *,
        keeps_gradients: bool,
    ) -> UnitUpdate:
        """Return the update with the optimizer's present settings. From now on the old values are stale."""
        record = self._records[unit]
        groups = self._optimizer.param_groups
        settings = {p: hyperparameters_of(groups[p.group]) for p in parameters if p.group is not None}
        # Edits of a whole are written to its tiles by way of their copies, so those become stale after it.
        for whole in {p.whole.unit for p in unit.parameters if p.whole is not None}:
            self._sources.of(whole).updated(whole)
        self._sources.of(unit).updated(unit)
        for parameter in settings:
            parameter.state.replace()
        return UnitUpdate(record, fresh, retained, settings, self._rule, factors, done, keeps_gradients=keeps_gradients)

    def submit(self, job: UnitUpdate) -> None:
        """Access its blocks and let the update worker run it."""
        record, store = job.record, self._host_cache.store
        block = record.unit.the_block()
        self._host_cache.access(block)
        store.hold(block)
        with self._host_cache.pinned(block):
            for chunk in record.chunks:
                if job.retained:
                    self._host_cache.access(chunk.gradient)
                    store.hold(chunk.gradient)
                if chunk.record is not None:
                    with self._host_cache.pinned(chunk.gradient):
                        self._host_cache.access(chunk.record)
                    store.hold(chunk.record)
                if not job.keeps_gradients:
                    self._host_cache.expire(chunk.gradient)
        self._submit(job)

    def retain(
        self,
        unit: Unit,
        fresh: FreshGradients,
        retained: Collection[ManagedParameter],
        squares: dict[Segment, float] | None,
        done: Callable[[], None],
    ) -> None:
        """Add fresh gradients of a unit into its gradient blocks, which have those of `retained` already."""
        record = self._records[unit]
        for chunk in record.chunks:
            self._host_cache.access(chunk.gradient)
            self._host_cache.store.hold(chunk.gradient)
        job = RetainGradients(record, fresh, frozenset(retained), squares, done)
        self._submit(job)

    def _submit(self, job: UnitUpdate | RetainGradients) -> None:
        num_threads = torch.get_num_threads() if self._on_all_cores else 1
        self._update_worker.submit(job, is_shared=self._is_shared, num_threads=num_threads)
