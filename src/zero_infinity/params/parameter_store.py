"""The store of one model's parameters: memory, files, host tier and threads, without any training state.

It exists from `zi.init` on, while the model is being built, or from `zi.prepare` on. Training adds optimizer state
records and gradients.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection

import torch

from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.errors import StuckThreadError, UsageError
from zero_infinity.params import offloaded_param
from zero_infinity.params.dtensor import local_of
from zero_infinity.params.offloaded_param import ParameterAccess
from zero_infinity.params.state_dict import StateDictScope
from zero_infinity.params.unit import Unit
from zero_infinity.params.unit_access import StorageIndex
from zero_infinity.params.unit_values import HostValues, ValueSources
from zero_infinity.policy.homes import Home
from zero_infinity.policy.partition import ONE_RANK, RankPartition, Sharding
from zero_infinity.policy.zero_stage import ZeroStage
from zero_infinity.run_trace import RunTrace
from zero_infinity.storage.block_store import BlockStore
from zero_infinity.storage.buffer_pool import BufferPool
from zero_infinity.storage.io_engine import IOEngine
from zero_infinity.storage.pinning import Pinning
from zero_infinity.tiers.compute_thread import ComputeThread
from zero_infinity.tiers.host_cache import HostCache
from zero_infinity.tiers.update_worker import UpdateWorker

# Prefetching needs a known order, and there is none before training.
_NO_LOOKAHEAD = 0


class ParameterStore:
    """The store of one model's parameters."""

    def __init__(
        self,
        config: Config,
        ranks: RankGroup | None,
        budget: int,
        parts: EngineParts = DEFAULT_PARTS,
        pinning: Pinning | None = None,
    ) -> None:
        self.config = config
        self.parts = parts
        self.ranks = ranks
        self.sharding = sharding_of(config, ranks)
        self.num_units = 0  # created so far
        rank = ranks.rank if ranks is not None else None
        self.run_trace = RunTrace(config.trace, budget, rank) if config.trace is not None else None
        trace = self.run_trace.trace if self.run_trace is not None else None
        if ranks is not None and trace is not None:
            ranks.trace_into(trace)
        pool = BufferPool(budget, pinning=pinning)
        engine = IOEngine(parts.make_device(config.nvme), trace=trace) if config.nvme else None
        self.store = BlockStore(pool, engine, verify=config.verify, trace=trace)
        self.update_worker = UpdateWorker(self.store, self.run_trace)
        self.compute_thread = ComputeThread(self.update_worker, self.run_trace)
        self.host_cache = HostCache(self.store, self.compute_thread, parts.make_policy, pool.budget, _NO_LOOKAHEAD)
        self.sources = ValueSources(HostValues(self.host_cache))
        self.storages = StorageIndex()
        self.state_dicts = StateDictScope()
        self.units: list[Unit] = []
        # Called in reverse order once the parameters can no longer be used. They must not refer to the model, because
        # they are kept until it is garbage-collected.
        self.closers: list[Callable[[], None]] = [self.store.close, self.update_worker.close]
        if self.run_trace is not None:
            self.closers.insert(0, self.run_trace.close)
        self._pid = os.getpid()
        weakref.finalize(
            self, _close_apart, self.closers, self._pid, is_traced=self.run_trace is not None
        ).atexit = False
        _alive.add(self)

    def check_same_place(self, config: Config) -> None:
        """Raise if `config` asks for a different store than the one that the model was built in."""
        for field in ("memory", "nvme", "verify", "stage", "partition", "trace"):
            built, asked = getattr(self.config, field), getattr(config, field)
            if built != asked:
                raise UsageError(
                    f"the model was built by zi.init with {field}={built!r}, but zi.prepare was given "
                    f"{field}={asked!r}\n  fix:   pass the same config to both"
                )

    def add(self, unit: Unit, home: Home) -> None:
        """Create the unit's block, without content."""
        block = self.store.create(unit.name, unit.stored_bytes, home)
        unit.state.store_in(block)
        self.host_cache.add(block)
        self.units.append(unit)

    def add_on_device(self, unit: Unit, device: torch.device) -> None:
        """Create the unit's block in device memory; a unit that was stored elsewhere moves there."""
        block = self.store.create_on_device(unit.name, unit.stored_bytes, device)
        if not unit.is_stored:
            unit.state.store_in(block)
            self.units.append(unit)
            return
        before = unit.the_block()
        with self.host_cache.reading(before) as memory:
            block.the_device_bytes().copy_(memory)
        unit.state.move_to(block)
        self.host_cache.expire(before)
        self.store.drop(before)

    def drop_forgotten(self, kept: Collection[Unit]) -> None:
        """Drop units whose parameters are no longer referenced: replaced while the model was built (tied weights)."""
        units = [u for u in self.units if u not in kept]
        # Drop our references: parameters that die were referenced by units only. Reference counts are not reliable
        # across versions of torch and Python, because a graph's references may not be counted.
        known = {p for unit in units for p in unit.parameters}
        held = [(p, weakref.ref(p.parameter)) for p in known | {p.whole for p in known if p.whole is not None}]
        for managed, _ in held:
            del managed.parameter
        alive = {managed: parameter for managed, reference in held if (parameter := reference()) is not None}
        for managed, parameter in alive.items():
            managed.parameter = parameter
        for unit in units:
            unit.parameters = [p for p in unit.parameters if p in alive]
            if not unit.parameters:
                self.drop(unit)

    def fill(self, unit: Unit) -> None:
        """Copy the values of a unit's parameters into its block."""
        with self.host_cache.writing(unit.the_block()) as memory, torch.no_grad():
            flat = memory.view(unit.dtype)
            if not unit.is_stored_in_parts:
                for managed in unit.parameters:
                    managed.of(flat).copy_(local_of(managed.value()))
            else:
                for managed in unit.parameters:
                    mine = unit.stored.overlap(managed.offset, managed.end)
                    part = managed.flattened(local_of(managed.value()))[
                        mine.start - managed.offset : mine.stop - managed.offset
                    ]
                    flat[mine.start - unit.stored.start : mine.stop - unit.stored.start].copy_(part)

    def offload(self, unit: Unit, access: ParameterAccess) -> None:
        """From now on the values are in the block, and `access` unshards them."""
        for managed in unit.parameters:
            shown = managed.whole or managed
            offloaded_param.adopt(shown, access)
            offloaded_param.reshard(shown)

    def drop(self, unit: Unit) -> None:
        """Drop a unit that has no parameters any more."""
        block = unit.the_block()
        self.units.remove(unit)
        self.host_cache.expire(block)
        self.store.drop(block)

    def close(self) -> None:
        """Release everything now. A forked child releases nothing: its copies end with the process."""
        if os.getpid() == self._pid:
            _close(self.closers)


def budget_of(config: Config, ranks: RankGroup | None) -> int:
    """Return the bytes that a rank may hold. Varies between calls unless the user has set them."""
    return config.memory_budget(ranks.num_local_ranks if ranks is not None else 1)


def sharding_of(config: Config, ranks: RankGroup | None) -> Sharding:
    """Return how this rank's units are sharded."""
    if ranks is None:
        return ONE_RANK
    return Sharding(ranks.rank, RankPartition(ranks.num_ranks, config.partition), ZeroStage(config.stage))


# Only for the end of the process: a thread that is inside torch when the interpreter exits crashes the process.
_alive: weakref.WeakSet[ParameterStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for host in list(_alive):
        host.close()


def _close_apart(closers: list[Callable[[], None]], pid: int, *, is_traced: bool) -> None:
    """Close on a separate thread: the garbage collector may run in any thread, while it holds any of our locks.

    A process that exits meanwhile waits for a trace to be written, and for nothing else. A forked child closes nothing:
    its copies of the locks may be held forever.
    """
    if os.getpid() != pid:
        return
    threading.Thread(target=_close, args=(closers,), name="zero-infinity-close", daemon=not is_traced).start()


def _close(closers: list[Callable[[], None]]) -> None:
    while closers:
        try:
            closers.pop()()
        except StuckThreadError as stuck:
            # The remaining resources are memory that the thread may still write to.
            closers.clear()
            warnings.warn(f"the thread {stuck} does not end; its memory is not released", stacklevel=1)
