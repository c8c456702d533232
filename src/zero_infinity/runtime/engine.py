"""One prepared model: the parts put together, and what can be asked of the whole.

The engine adds training to a host of parameters: records of optimizer state, the flow of gradients, the worker and the
hooks. Several engines live side by side in one process; there are no globals. An engine ends with its model: when that
is collected, or the process ends, threads, memory and swap files go.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_infinity.config import Config
from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.interrupts import held
from zero_infinity.runtime import hooks, parked, recompute
from zero_infinity.runtime.accelerator import CpuPlace, Memory, Place
from zero_infinity.runtime.activations import Activations
from zero_infinity.runtime.alternatives import Watch
from zero_infinity.runtime.arena import Arena
from zero_infinity.runtime.assembled import Assembled, Lender
from zero_infinity.runtime.dtensors import check_group, like, local_of, whole_norms
from zero_infinity.runtime.exchange import ParameterExchange
from zero_infinity.runtime.gradients import Gradients
from zero_infinity.runtime.host import ParameterHost, budget_of, host_of, sharding_of
from zero_infinity.runtime.keeper import RecordKeeper
from zero_infinity.runtime.lazy_logits import make_logits
from zero_infinity.runtime.loss_scale import CastInputs, LossScale, ScaleOutputs
from zero_infinity.runtime.placement import Placement, UnitSize, place
from zero_infinity.runtime.precision import Precision, multiplies_fast, precision_of
from zero_infinity.runtime.record import Record, RecordMaker, make_chunks
from zero_infinity.runtime.recording import BACKWARD, STEP
from zero_infinity.runtime.reducer import Reducer
from zero_infinity.runtime.replicas import Replicas
from zero_infinity.runtime.residency import Spare
from zero_infinity.runtime.sharded_gradients import ShardedGradients
from zero_infinity.runtime.shelf import BlockShelf, Shelf
from zero_infinity.runtime.sources import ComputeCache, Source, check_room, copy_size
from zero_infinity.runtime.stats import Stats
from zero_infinity.runtime.tiled_use import TiledWeight
from zero_infinity.runtime.tiles import Tiling, check_room_to_cut, cut, find_tileable
from zero_infinity.runtime.unit import ManagedParameter, Unit, find_parameters, make_unit, refuse_shared_memory
from zero_infinity.runtime.unmanaged import UnmanagedParameters
from zero_infinity.runtime.updater import Updater
from zero_infinity.shard.group import RankGroup
from zero_infinity.shard.partition import Span
from zero_infinity.shard.wire import Topic, Wire
from zero_infinity.store.block import Home
from zero_infinity.store.extents import round_up
from zero_infinity.trace import COPIES, DEVICE, HOST
from zero_infinity.units import format_count

Owners = dict[nn.Module, list[ManagedParameter]]
# Who owns what, units that are replaced, the room for copies, and hosts that the model was built in.
_LayOut = tuple[Owners, list[Unit], int, set[ParameterHost]]

# Copies of parameters in another dtype may take this part of the memory (or two of the largest, if that is more).
_COPY_SHARE = 1 / 8
# Whole units, gathered from ranks that store parts, may take this part.
_GATHER_SHARE = 1 / 4
# Buckets in which gradients go to other ranks: about 1/64 of the memory, twice, and within these bounds. Messages of a
# MiB reach the bandwidth of a socket; larger ones only take memory.
_BUCKETS_IN_MEMORY = 64
_MIN_BUCKET_BYTES = 64 << 10
_MAX_BUCKET_BYTES = 4 << 20
# Topics that are no unit's.
_START, _LAYERS = -10, -11
# Copies are made ahead as far as this part of their room reaches.
_LOOKAHEAD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class _Wires:
    """To the other ranks, one for each thread."""

    steps: Wire  # of the thread that computes
    gradients: Wire
    copies: Wire | None  # of parameters of which each rank stores a part
    exchange: Wire | None  # of parameters of which each rank updates a part


class TrainingEngine:
    """Trains one model with one optimizer within a byte budget."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: Config,
        accelerator: Place | None,
        ranks: RankGroup | None = None,
        replicas: RankGroup | None = None,
    ) -> None:
        self.config = config
        self._replicas = replicas
        self.ranks = _ranks_of(model) or ranks
        self._sharding = sharding_of(config, self.ranks)
        self.user_optimizer = optimizer
        self.grad_norm: torch.Tensor | None = None
        self._accelerator = accelerator
        self._zeros = False  # gradients were set to zeros rather than to None
        self._num_steps = 0
        self._model_parameters = list(model.parameters())
        self._device = accelerator.device if accelerator is not None else torch.device("cpu")

        # Asked once: what is available changes.
        hosts = {host_of(m) for p in self._model_parameters if (m := parked.managed(p)) is not None}
        self._budget = min((host.store.pool.budget for host in hosts), default=0) or budget_of(config, self.ranks)
        # What ranks decide by that have to decide alike: the smallest budget of all.
        self._common_budget = self._budget
        if self.ranks is not None:
            self._common_budget = self.ranks.smallest("the memory of zi.prepare", self._budget)
        self._is_fast = self._agree_on_speed()

        # First what can fail for a user's mistake, before anything moves.
        with self._agreed("zi.prepare (checks)"):
            owners, replaced, copies = self._plan(model, optimizer)
        try:
            with self._agreed("zi.prepare (swap space)"):
                self._divide(self.placement, copies)
            with self._agreed("zi.prepare (connecting)"):
                self._wires = self._connect(copies)
                self.activations = self._make_activations()
            with self._agreed("zi.prepare (moving in)"):
                self._build(model, copies, replaced)
        except BaseException:
            # Nothing was parked yet: with the host gone the model is as plain as before.
            self.host.close()
            raise
        self._watch(model, owners)

    def _agreed(self, phase: str) -> AbstractContextManager[None]:
        return self.ranks.agreed(phase) if self.ranks is not None else nullcontext()

    def _agree_on_speed(self) -> bool | None:
        """Whether all ranks compute in 16 bits when nobody said that they should; it is measured."""
        stored = self.config.param_dtype
        if self.ranks is None or stored is None or stored == "float32" or self.config.compute_dtype is not None:
            return None
        fast = multiplies_fast(getattr(torch, stored), self._device)
        return bool(self.ranks.smallest("the speed of 16-bit computation", fast))

    def _plan(self, model: nn.Module, optimizer: Optimizer) -> tuple[Owners, list[Unit], int]:
        """Find out what there is and where it goes; what it says: owners, units to be replaced, room for copies."""
        refuse_shared_memory(model)
        check_group(dict(model.named_parameters()), self.ranks.group if self.ranks is not None else None)
        self._recomputed = recompute.find_blocks(model, self.config)
        if self._replicas is not None and not self._recomputed:
            raise UsageError(
                "activation_group= splits the inputs of recomputed blocks, and none is recomputed\n"
                "  fix:   checkpoint_activations=True in zi.Config"
            )
        owners, replaced, copies, hosts = self._lay_out_to_fit(model, optimizer)
        self.host = hosts.pop() if hosts else ParameterHost(self.config, self.ranks, self._budget)
        self.store = self.host.store
        self.residency = self.host.residency
        self._recording = self.host.recording
        if self._recording is not None:
            self._recording.trace.title = self._title(model)
        self.loss_scale = LossScale() if any(u.compute_dtype is torch.float16 for u in self.units) else None
        return owners, replaced, copies

    def _lay_out_to_fit(self, model: nn.Module, optimizer: Optimizer) -> _LayOut:
        """With whole layers where they fit, so that nothing changes for a model that does; else with tiles."""
        if self.config.tile_above is not None:
            return self._lay_out(model, optimizer, Tiling(self.config.tile_above))
        found: _LayOut | None = None
        try:
            found = self._lay_out(model, optimizer, None)
        except CapacityError:
            found = None
        finally:
            if self.ranks is not None and not self.ranks.smallest("whether layers fit whole", int(found is not None)):
                found = None
        return found or self._lay_out(model, optimizer, Tiling.by_default(self._least_budget()))

    def _least_budget(self) -> int:
        """Of the tiers that a tile has to fit in."""
        device = self.config.device_memory or (self._accelerator.budget if self._accelerator is not None else None)
        return self._common_budget if device is None else min(self._common_budget, device)

    def _lay_out(self, model: nn.Module, optimizer: Optimizer, tiling: Tiling | None) -> _LayOut:
        config = self.config
        owners, replaced = self._make_units(model, tiling)
        self.units = list(dict.fromkeys(p.unit for members in owners.values() for p in members))
        self._managed = {p.parameter: p.whole or p for unit in self.units for p in unit.parameters}
        unmanaged = _assign_groups(optimizer, self._managed, self._model_parameters)
        self._unmanaged = UnmanagedParameters(optimizer, unmanaged)
        self.records = self._make_records()
        # A rank of stage 1 updates its part, and keeps whole gradients until then.
        self._whole_gradients = self.ranks is not None and config.stage == 1
        self._sizes = [
            _size(unit, self.records.get(unit), whole_gradients=self._whole_gradients) for unit in self.units
        ]
        together = _needed_together(owners, self._recomputed)
        hosts = {host_of(p) for unit in {*self.units, *replaced} for p in unit.parameters if unit.block is not None}
        for host in hosts:
            host.check_same_place(config)
        return owners, replaced, self._place(together, replaced), hosts

    def _title(self, model: nn.Module) -> str:
        """Of a trace."""
        num_parameters = format_count(sum(p.num_elements for p in self._managed.values()))
        rank = f", rank {self.ranks.rank} of {self.ranks.num_ranks}" if self.ranks is not None else ""
        return f"{type(model).__name__}: {num_parameters} parameters{rank}"

    def _place(self, together: list[list[Unit]], replaced: list[Unit]) -> int:
        """Divide the memory; returns the room for copies."""
        config, accelerator = self.config, self._accelerator
        budget, common = self._budget, self._common_budget
        self._bucket_bytes = _bucket_bytes(common) if self.ranks is not None else 0
        copies = self._copy_bytes = 0 if accelerator is not None else _copy_budget(self.units, together, common)
        if accelerator is not None:
            check_room(together, config.device_memory or accelerator.budget)
        at_once = [(units[0].name, sum(round_up(unit.stored_bytes) for unit in units)) for units in together]
        # Units that are about to be replaced are still there while their successors move in.
        old = sum(u.the_block().held_bytes for u in replaced if u.the_block().home is Home.RAM)
        free = budget - copies - old - 2 * self._bucket_bytes
        self.placement = place(
            self._sizes, free, at_once, nvme=bool(config.nvme), activations=config.offload_activations in (True, "all")
        )
        # What is left is for tiles that are put together and, where nothing leaves memory, for saved tensors.
        self._spare = Spare(free - self.placement.needed)
        check_room_to_cut(self._tiled, self.placement.cache, budget)
        return copies

    def _build(self, model: nn.Module, copies: int, replaced: list[Unit]) -> None:
        """Everything that may fail for want of room or for a drive's error; the last thing is to park parameters."""
        self.host.drop_forgotten({*self.units, *replaced})
        self._spread_values(model)
        self._cache = self._make_cache(copies)
        new_units = [unit for unit in self.units if unit.block is None]
        self._change_source([unit for unit in (*self.units, *replaced) if unit.block is not None])
        for unit, home in zip(self.units, self.placement.homes, strict=True):
            if unit.block is None:
                self.host.add(unit, home)
        self._make_chunks()
        self.keeper = RecordKeeper(self.residency, self.records, self._wires.steps if self._wires is not None else None)
        self._updater = Updater(self.store, shares_cores=self._accelerator is None, recording=self.residency.recording)
        self.residency.before_wait = self._updater.take_over
        self.host.closers.append(self._updater.close)
        self.gradients = self._make_gradients()
        for unit in self.units:
            self._write_masters(unit)
        for unit in new_units:
            self.host.fill(unit)
        self._take_states()
        self._use_tiles()
        self.store.settle()
        for unit in new_units:
            self.host.park(unit)
        for unit in replaced:
            self.host.drop(unit)
        if self.ranks is not None:
            self.host.closers.append(self.ranks.leave)

    # ------------------------------------------------------------------ setting up

    def _use_tiles(self) -> None:
        """Let torch functions use parameters tile by tile where that can be done, and find them whole elsewhere."""
        lender: Lender = self.residency
        allocate: Callable[[int], Memory] = self.store.pool.take
        spare, budget = self._spare, self._budget
        if self._accelerator is not None and self._cache is not None:
            lender, allocate = self._cache, self._accelerator.allocate
            spare, budget = Spare(0), self.config.device_memory or self._accelerator.budget
        exposure = self.host.exposure
        assembled = Assembled(exposure, lender, allocate, spare, budget)
        for whole, makes_logits in self._tiled.items():
            whole.unit.source = assembled
            use = TiledWeight(whole, exposure, assembled, self.gradients)
            # Scaled losses are made of the model's outputs, which have to be there for that.
            use.make_logits = make_logits if makes_logits and self.loss_scale is None else None
            whole.tiled_use = use

    def _make_units(self, model: nn.Module, tiling: Tiling | None) -> tuple[Owners, list[Unit]]:
        """The parameters of each module that owns some; and units of `zi.init` that are stored in another dtype now."""
        owners: Owners = {}
        replaced: dict[Unit, None] = {}
        self._tiled: dict[ManagedParameter, bool] = {}  # and whether it makes logits
        tileable = find_tileable(model) if tiling is not None else {}
        known_parts = (known.parts for p in model.parameters() if (known := parked.managed(p)) is not None)
        built = {part.unit.number for parts in known_parts for part in parts}
        numbers = itertools.count(max(built, default=-1) + 1)
        for module, name, parameters in find_parameters(model):
            fresh: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
            num_rows = {
                parameter: tiling.rows(full_name, parameter.shape, self._precision_of(parameter.dtype))
                for full_name, parameter in parameters
                if tiling is not None and parameter in tileable
            }
            torn_up = {
                known.unit
                for p, rows in num_rows.items()
                if (known := parked.managed(p)) is not None and rows != known.rows_of_a_tile
            }
            for full_name, parameter in parameters:
                known = parked.managed(parameter)
                dtypes = self._precision_of(parameter.dtype)
                unchanged = known is not None and (known.unit.dtype, known.unit.compute_dtype) == (
                    dtypes.stored,
                    dtypes.computed,
                )
                rows = num_rows.get(parameter)
                if known is not None and unchanged and rows == known.rows_of_a_tile and known.unit not in torn_up:
                    known.rename(name or type(model).__name__, full_name)
                    owners.setdefault(module, []).extend(known.parts)
                    if known.tiles:
                        self._tiled[known] = tileable[parameter]
                    continue
                if known is not None:
                    replaced.update(dict.fromkeys(part.unit for part in known.parts))
                if rows is not None:
                    whole = cut(
                        name or type(model).__name__,
                        full_name,
                        parameter,
                        rows,
                        precision=dtypes,
                        device=self._device,
                        numbers=numbers,
                        sharding=self._sharding,
                    )
                    self._tiled[whole] = tileable[parameter]
                    owners.setdefault(module, []).extend(whole.tiles)
                    continue
                fresh.setdefault(parameter.dtype, []).append((full_name, parameter))
            for own, members in fresh.items():
                dtypes = self._precision_of(own)
                unit_name = (name or type(model).__name__) + (f" ({own})" if len(fresh) > 1 else "")
                unit = make_unit(
                    unit_name,
                    members,
                    dtype=dtypes.stored,
                    compute_dtype=dtypes.computed,
                    device=self._device,
                    number=next(numbers),
                    sharding=self._sharding,
                )
                owners.setdefault(module, []).extend(unit.parameters)
        return owners, list(replaced)

    def _precision_of(self, dtype: torch.dtype) -> Precision:
        return precision_of(dtype, self.config, self._device, fast=self._is_fast)

    def _make_records(self) -> dict[Unit, Record]:
        records = {}
        maker = RecordMaker(self.user_optimizer)
        for unit in self.units:
            record = maker.make(unit, self._precision_of(unit.dtype).optimized)
            if record is not None:
                records[unit] = record
        return records

    def _divide(self, placement: Placement, copies: int) -> None:
        """Set apart what is not for the cache, and reserve room on NVMe."""
        self.host.end_construction()
        self.residency.limit(placement.cache, placement.lookahead)
        self.store.pool.charge(placement.set_aside + copies + 2 * self._bucket_bytes)
        self.store.reserve(placement.swap)

    def _connect(self, copies: int) -> _Wires | None:
        """One wire to the other ranks for each thread that talks to them."""
        if self.ranks is None:
            return None
        self.ranks.names.update({unit.number: unit.name for unit in self.units})
        stage = self._sharding.stage
        device = self._accelerator.device if self._accelerator is not None else torch.device("cpu")
        copied = stage == 3 and (self._accelerator is not None or copies)
        wires = _Wires(
            steps=self.ranks.wire("steps"),
            gradients=self.ranks.wire("gradients"),
            copies=self.ranks.wire("parameters", device) if copied else None,
            exchange=self.ranks.wire("parameters") if stage in (1, 2) else None,
        )
        sizes = [len(self.units), sum(unit.num_elements for unit in self.units)]
        said = wires.steps.agree(Topic("start", _START, "the sizes of the model"), sizes)
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise UsageError(
                    f"rank {rank} has a model of {theirs[0]} units and {theirs[1]:,} elements, rank 0 one of "
                    f"{said[0][0]} units and {said[0][1]:,} elements\n  fix:   build the same model on every rank"
                )
        return wires

    def _spread_values(self, model: nn.Module) -> None:
        """All ranks start with the values of the first."""
        if self._wires is None:
            return
        topic = Topic("start", _START, "the values to start with")
        plain = [local_of(p.detach()) for p in self._managed if parked.managed(p) is None]
        for tensor in [*plain, *map(local_of, model.buffers())]:
            self._wires.steps.spread(topic, tensor)

    def _make_cache(self, copies: int) -> ComputeCache | None:
        if self._accelerator is None and not copies:
            return None
        where: Place = self._accelerator or CpuPlace(copies)
        budget = copies or self.config.device_memory or where.budget
        wire = self._wires.copies if self._wires is not None else None
        tier = COPIES if self._accelerator is None else DEVICE
        cache = ComputeCache(self.residency, where, budget, int(budget * _LOOKAHEAD_SHARE), wire, tier=tier)
        self.host.closers.append(cache.copier.close)
        return cache

    def _make_activations(self) -> Activations | None:
        """Who keeps the tensors that autograd saves, if that is not torch alone."""
        offload = self.config.offload_activations
        if self._replicas is None and not offload:
            return None
        shelf: Shelf = Arena(self._device)
        if offload in (True, "all"):
            home = Home.NVME if self.config.nvme else Home.RAM
            beside = Spare(self.placement.cache - self.placement.least)
            shelf = BlockShelf(self.residency, home, beside if self.config.nvme else self._spare)
        if self._replicas is None:
            return Activations(shelf)
        self._replicas.trace = self._recording.trace if self._recording is not None else None
        self.host.closers.append(self._replicas.leave)
        return Activations(shelf, Replicas(self._replicas.wire("activations", self._device)))

    def _make_chunks(self) -> None:
        for unit, record in self.records.items():
            for block in make_chunks(
                record,
                self.placement.chunk_bytes,
                unit.the_block().home,
                self.store,
                whole_gradients=self._whole_gradients,
            ):
                self.residency.add(block)

    def _make_gradients(self) -> Gradients:
        clips = self.config.max_grad_norm is not None
        parts = (self.residency, self._updater, self.user_optimizer, self.records)
        reserve = self.placement.set_aside
        num_backwards = self.config.gradient_accumulation_steps
        early = self.config.update == "auto" and not clips and self.loss_scale is None
        norms = clips or self.loss_scale is not None
        download = self._accelerator.download if self._accelerator is not None else None
        if self._wires is None:
            return Gradients(
                *parts, reserve=reserve, num_backwards=num_backwards, early=early, norms=norms, download=download
            )
        stage = self._sharding.stage
        reduce_dtype = getattr(torch, self.config.reduce_dtype) if self.config.reduce_dtype else None
        reducer = Reducer(self._wires.gradients, self._bucket_bytes, wire_dtype=reduce_dtype, everywhere=stage == 0)
        self.host.closers.append(reducer.close)
        exchange = None
        if self._wires.exchange is not None:
            exchange = ParameterExchange(self.store, self._wires.exchange)
            self.host.closers.append(exchange.close)
        return ShardedGradients(
            *parts,
            reserve=reserve,
            num_backwards=num_backwards,
            early=early,
            norms=norms,
            download=download,
            stage=stage,
            wire=self._wires.steps,
            reducer=reducer,
            exchange=exchange,
        )

    def _write_masters(self, unit: Unit) -> None:
        record = self.records.get(unit)
        if record is not None and record.has_master:
            for managed in record.state_names:
                self.keeper.write_master(managed, local_of(managed.value()))

    def _take_states(self) -> None:
        """Move states that the user's optimizer has (it was used before) into records."""
        taken = [(p, m) for p, m in self._managed.items() if m.group is not None and p in self.user_optimizer.state]
        for parameter, managed in taken:
            self.keeper.write_state(managed, self.user_optimizer.state[parameter])
        for parameter, _ in taken:
            del self.user_optimizer.state[parameter]

    def _watch(self, model: nn.Module, owners: Owners) -> None:
        """From here on, see every read, change and gradient."""
        self._change_source([unit for unit in self.units if unit.source is not self._cache])
        self.host.training = self
        if self.activations is not None:
            self.host.exposure.keep_saved = self.activations.pack
            self.host.exposure.keeps_all = self.config.offload_activations == "all"
        self.host.exposure.on_read = self.gradients.on_read if self._recording is None else self._recorded_read
        self.host.exposure.on_edit = self._edited
        for managed in self._managed.values():
            if managed.group is not None:
                managed.gradient_hook = GradientHook(self.gradients, managed)
                managed.hook_gradient_last()
        hooks.attach(model, self.host.exposure, owners, self._recording)
        recompute.attach(self._recomputed, self.host.exposure if self.activations is not None else None)
        self._watch_alternatives(model, owners)
        model.__dict__["zero_grad"] = hooks.ZeroGradients(model, self)
        computed = {u.compute_dtype for u in self.units}
        if len(computed) == 1 and (self.config.param_dtype or self.config.compute_dtype):
            model.register_forward_pre_hook(CastInputs(computed.pop()), prepend=True, with_kwargs=True)
        if self.loss_scale is not None:
            model.register_forward_hook(ScaleOutputs(self.loss_scale))

    def _watch_alternatives(self, model: nn.Module, owners: Owners) -> None:
        """Find out which layers are called by every rank, and which each rank chooses from."""
        gradients, cache = self.gradients, self._cache
        if self._wires is None or not isinstance(gradients, ShardedGradients):
            return
        wire = self._wires.steps
        watch = Watch(model, owners)
        by_number = {unit.number: unit for unit in self.units}
        is_gathered = cache is not None and self._sharding.stage == 3

        def classify() -> Collection[Unit]:
            seen = wire.agree(Topic("layers", _LAYERS, "the first gradient"), watch.evidence())
            found = watch.end(seen)
            if cache is not None:
                cache.on_mismatch = lambda _: None
                for container in found if is_gathered else ():
                    cache.join(container.name, container.units)
            return {unit for container in found for unit in container.units}

        def resolve(wanted: Sequence[int]) -> tuple[str, Sequence[Unit]] | None:
            for number in sorted(set(wanted)):
                joined = cache.group_of(number) if cache is not None else None
                container = watch.innermost(by_number[number]) if number in by_number else None
                if joined is not None:
                    return joined
                if container is not None and container.may_be_chosen_from:
                    return container.name, container.units
            return None

        gradients.find_late_units = classify
        if cache is not None and is_gathered:
            cache.on_mismatch = resolve

    def _change_source(self, units: Iterable[Unit]) -> None:
        """Let modules see copies of those that they cannot see as they are stored."""
        for unit in units:
            if self._cache is not None and (self._accelerator is not None or _is_copied(unit)):
                self._cache.add(unit)
                unit.source = self._cache

    def _recorded_read(self, unit: Unit) -> None:
        """In place of `Gradients.on_read` when there is a record of the run."""
        self.gradients.on_read(unit)
        if self._recording is not None:
            if torch._C._current_graph_task_id() >= 0:
                self._recording.begin(BACKWARD)
            self._recording.computing(unit.name)

    def _edited(self, managed: ManagedParameter, flat: torch.Tensor) -> None:
        value = managed.of(flat)
        for part in managed.parts:
            if part.unit in self.records and part.group is not None:
                self.keeper.write_master(part, value if part is managed else part.rows_of(value))

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """Update with what is left of the gradients."""
        recording = self._recording
        if recording is not None:
            recording.begin(STEP)
            recording.computing("optimizer step")
        with held():
            self._step()
        if recording is not None:
            recording.trace.held(HOST, time.perf_counter(), self.store.pool.held_bytes)
            recording.end(STEP)

    def _step(self) -> None:
        self._take_hand_made_gradients()
        self._take_zeros()
        self.gradients.before_step()
        if self._wires is not None and self._unmanaged:
            self._unmanaged.average(self._wires.steps)
        factors: tuple[torch.Tensor, ...] = ()
        norms: dict[ManagedParameter | nn.Parameter, torch.Tensor] = {}
        if self.loss_scale is not None or self.config.max_grad_norm is not None:
            norms.update(self.gradients.norms.items())
            norms.update(self._unmanaged.norms().items())
            of = [key.parameter if isinstance(key, ManagedParameter) else key for key in norms]
            norms = dict(zip(norms, whole_norms(list(norms.values()), of), strict=True))
        if self.loss_scale is not None:
            overflowed = not all(torch.isfinite(norm).item() for norm in norms.values())
            unscale = torch.tensor(1.0 / self.loss_scale.scale)
            self.loss_scale.judge(overflowed=overflowed)
            if overflowed:
                self.gradients.skip()
                return
            factors += (unscale,)
            norms = {parameter: norm * unscale for parameter, norm in norms.items()}
        if self.config.max_grad_norm is not None:
            found = [norms[key] for p in self._model_parameters for key in _parts_of(p) if key in norms]
            self.grad_norm, clip = _clip_factors(found, self.config.max_grad_norm)
            factors += clip
        self.gradients.step(factors)
        self._unmanaged.step(factors)
        for source in self._sources():
            source.end_cycle(same_order=self.gradients.same_order)
        if self.activations is not None:
            self.activations.end_cycle()
        self._num_steps += 1
        if self.ranks is not None:
            self.ranks.num_steps = self._num_steps

    def clip_now(self, parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Clip the retained gradients of these parameters; returns their norm."""
        if self.gradients.cycle.updated:
            raise UsageError(
                "zi.clip_grad_norm_ comes too late: parameters were updated while backward ran\n"
                '  fix:   update="after_backward" or max_grad_norm=... in zi.Config'
            )
        clipped = list(parameters)
        found = [(p, torch.linalg.vector_norm(gradient)) for p, _, gradient in self._gradients_of(clipped)]
        norm, factors = _clip_factors(whole_norms([n for _, n in found], [p for p, _ in found]), max_norm)
        for _, managed, gradient in self._gradients_of(clipped):
            for factor in factors:
                gradient.mul_(factor)
            if managed is not None:
                self.gradients.replace(managed, gradient)
        return norm

    def _gradients_of(
        self, parameters: Iterable[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, ManagedParameter | None, torch.Tensor]]:
        """Retained gradients (over data-parallel ranks whole), with whose they are; and those on their parameters."""
        for parameter in parameters:
            managed = parked.managed(parameter)
            if managed is None or managed.group is None:
                if parameter.grad is not None:
                    yield parameter, None, parameter.grad
                continue
            for part in managed.parts:
                gradient = self.gradients.gather(part)
                if gradient is not None:
                    yield parameter, part, gradient

    def discard_gradients(self, *, set_to_none: bool) -> None:
        """Forget gradients that no update was submitted for; or set those that there have been to zero."""
        with held(), torch._C.DisableTorchFunctionSubclass():
            self.gradients.discard()
            if set_to_none:
                self.gradients.seen.clear()
            self._zeros = set_to_none is False
            self._unmanaged.zero_grad(set_to_none=set_to_none)
            for parameter, managed in self._managed.items():
                if managed.group is not None:
                    parameter.grad = None

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backwards in here only accumulate."""
        before = self.gradients.synchronised
        self.gradients.synchronised = False
        try:
            yield
        finally:
            self.gradients.synchronised = before

    def _take_zeros(self) -> None:
        """After zero_grad(set_to_none=False) a parameter that is not used has a gradient all the same: zeros."""
        if self._zeros:
            for managed in [
                part
                for whole in self._managed.values()
                for part in whole.parts
                if part in self.gradients.seen and not self.gradients.has(part)
            ]:
                self.gradients.take(managed, torch.zeros(managed.shape, dtype=managed.unit.compute_dtype))

    def _take_hand_made_gradients(self) -> None:
        """Gradients that the user put on parameters himself."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [(m, p.grad) for p, m in self._managed.items() if p.grad is not None and m.group is not None]
            for managed, _ in found:
                managed.parameter.grad = None
        for managed, gradient in found:
            if gradient is not None:
                for part in managed.parts:
                    self.gradients.take(part, part.rows_of(gradient))

    # ------------------------------------------------------------------ values and states

    @contextmanager
    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> Iterator[None]:
        """Inside, retained gradients are on the (exposed) parameters; what is changed is kept."""
        shown = [m for m in parameters if m.group is not None]
        for managed in shown:
            gradients = [g for part in managed.parts if (g := self.gradients.gather(part)) is not None]
            whole = torch.cat(gradients) if len(gradients) > 1 else next(iter(gradients), None)
            managed.parameter.grad = like(managed.parameter, whole) if whole is not None else None
        try:
            yield
        finally:
            for managed in shown:
                gradient = managed.parameter.grad
                managed.parameter.grad = None
                if gradient is not None:
                    for part in managed.parts:
                        self.gradients.replace(part, part.rows_of(local_of(gradient)))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the plain optimizer's `state_dict()` would be, in memory."""
        self.settle()
        numbers = {p: i for i, p in enumerate(p for g in self.user_optimizer.param_groups for p in g["params"])}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[p] for p in group["params"]]}
            for group in self.user_optimizer.param_groups
        ]
        states = {
            number: self.keeper.read_state(self._managed[p]) if p in self._managed else self._unmanaged.state(p)
            for p, number in numbers.items()
        }
        return {"state": {n: state for n, state in states.items() if state is not None}, "param_groups": groups}

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take in the states of a plain optimizer's `state_dict()`."""
        self.settle()
        parameters = [p for group in self.user_optimizer.param_groups for p in group["params"]]
        for number, state in state_dict["state"].items():
            if parameters[number] in self._managed:
                self.keeper.check_state(self._managed[parameters[number]], state)
        self.user_optimizer.load_state_dict(state_dict)
        self.keeper.forget_states()
        self._take_states()

    def _sources(self) -> set[Source]:
        """Of all units, also of those that are put together from tiles."""
        return {unit.the_source() for unit in (*self.units, *(whole.unit for whole in self._tiled))}

    def settle(self) -> None:
        """Wait until every update that was submitted is done and no byte is on its way."""
        self._updater.drain()
        self.gradients.drain()
        self.store.settle()

    # ------------------------------------------------------------------ checkpoints

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def step_wire(self) -> Wire | None:
        """To the other ranks, for the thread that computes."""
        return self._wires.steps if self._wires is not None else None

    def rest(self) -> None:
        """Wait until nothing is under way and every block holds what its users see; between two steps only."""
        self.gradients.check_between_steps()
        self.settle()
        for source in self._sources():
            source.write_home()
        for unit, record in self.records.items():
            for managed in unit.parameters:
                if record.has_master and managed.edited and managed in record.state_names:
                    self.keeper.take_edits(managed)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Inside, every value and state is replaced. A failure leaves neither the old ones nor the new ones: torn."""
        self.gradients.restart()
        self.settle()
        for unit in (*(whole.unit for whole in self._tiled), *self.units):
            unit.the_source().updated(unit)
        self.gradients.torn = "loading a checkpoint failed half-way: some values are old ones and some new ones"
        yield
        self.gradients.torn = None
        for managed in self._managed.values():
            for part in managed.parts:
                part.num_changes += 1
                part.edited = False
        for source in self._sources():
            source.end_cycle(same_order=False)
        self.residency.end_cycle(same_order=False)

    def go_on_from(self, num_steps: int) -> None:
        """This many steps have been taken."""
        self._num_steps = num_steps
        if self.ranks is not None:
            self.ranks.num_steps = num_steps

    def write_trace(self) -> None:
        """Write what was recorded so far, if a trace is wanted."""
        if self._recording is not None:
            self._recording.write()

    def stats(self) -> Stats:
        """What is held and what was done so far."""
        counters = self.store.engine.counters() if self.store.engine is not None else None
        self.store.pool.collect()
        sent, calls = self.ranks.traffic.snapshot() if self.ranks is not None else ({}, {})
        if self._replicas is not None:
            of_activations = self._replicas.traffic.snapshot()
            sent, calls = sent | of_activations[0], calls | of_activations[1]
        return Stats(
            num_steps=self._num_steps,
            num_parameters=sum(p.num_elements for p in self._managed.values()),
            state_bytes=sum(size.parameters + size.record for size in self._sizes),
            memory_budget=self.store.pool.budget,
            memory_held=self.store.pool.held_bytes,
            memory_peak=self.store.pool.peak_bytes,
            swap_bytes=self.placement.swap,
            bytes_read=counters.bytes_read if counters else 0,
            bytes_written=counters.bytes_written if counters else 0,
            read_requests=counters.read_requests if counters else 0,
            write_requests=counters.write_requests if counters else 0,
            waited_seconds=self.residency.waited_seconds,
            io_busy_seconds=counters.busy_seconds if counters else 0.0,
            num_deviations=self.residency.policy.num_deviations,
            pending_updates=self._updater.num_pending,
            parameter_bytes=sum(size.parameters for size in self._sizes),
            gradient_bytes=sum(size.gradients for size in self._sizes),
            optimizer_bytes=sum(size.record for size in self._sizes),
            bucket_bytes=2 * self._bucket_bytes,
            copy_bytes=self._copy_bytes,
            activation_bytes=self.activations.shelf.total_bytes if self.activations is not None else 0,
            sent_bytes=sent,
            num_exchanges=calls,
        )


class GradientHook(hooks.Hook):
    """Called by autograd when a parameter's gradient is there.

    Autograd holds it from C++, where the garbage collector does not look: strong references would keep the model for
    ever.
    """

    def __init__(self, gradients: Gradients, managed: ManagedParameter) -> None:
        self._gradients = weakref.ref(gradients)
        self._managed = weakref.ref(managed)

    def __call__(self, _: torch.Tensor) -> None:
        gradients, managed = self._gradients(), self._managed()
        if gradients is not None and managed is not None:
            with held():
                gradients.on_gradient(managed)

    def has_gradient(self) -> bool:
        gradients, managed = self._gradients(), self._managed()
        return gradients is not None and managed is not None and any(map(gradients.has, managed.parts))


def _clip_factors(norms: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The norm of all, and what `torch.nn.utils.clip_grad_norm_` would multiply gradients by."""
    if not norms:
        return torch.tensor(0.0), ()
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm, (torch.clamp(max_norm / (norm + 1e-6), max=1.0),)


def _assign_groups(
    optimizer: Optimizer, managed: dict[nn.Parameter, ManagedParameter], model_parameters: Collection[nn.Parameter]
) -> dict[nn.Parameter, None]:
    """Tell each parameter its group; returns those of the model, in its order, that are in a group and not managed."""
    unmanaged = set(model_parameters) - managed.keys()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in managed:
                for one in (managed[parameter], *managed[parameter].tiles):
                    one.group = number
            elif parameter not in unmanaged:
                raise UsageError(
                    f"parameter group {number} has a parameter of shape {tuple(parameter.shape)} ({parameter.dtype}) "
                    "that is not one of the model's parameters\n"
                    "  fix:   make the optimizer from model.parameters()"
                )
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    return dict.fromkeys(p for p in model_parameters if p in unmanaged and p in trained)


def _size(unit: Unit, record: Record | None, *, whole_gradients: bool) -> UnitSize:
    home = unit.block.home if unit.block is not None else None
    if record is None:
        return UnitSize(unit.name, round_up(unit.stored_bytes), 0, 0, 0, home)
    whole = record.num_elements(Span(0, unit.num_elements)) * record.dtype.itemsize
    mine = record.num_elements(unit.owned) * record.dtype.itemsize
    # A sum over ranks comes beside the gradient that it is made of.
    arriving = whole if mine == whole and len(unit.spans) == 1 else whole + mine
    kept = whole if whole_gradients else mine
    return UnitSize(unit.name, round_up(unit.stored_bytes), mine * len(record.slots), kept, arriving, home)


def _needed_together(owners: Owners, recomputed: Iterable[nn.Module]) -> list[list[Unit]]:
    """For each module the units that are read at once."""
    # The first operation of a block that backward comes to starts its second computation, with its own unit in hand.
    first: dict[nn.Module, Unit] = {}
    for block in recomputed:
        units = [p.unit for module in block.modules() for p in owners.get(module, [])]
        if units:
            first.update(dict.fromkeys(block.modules(), max(units, key=lambda unit: unit.stored_bytes)))
    together = []
    for module, parameters in owners.items():
        members = list(parameters)
        if isinstance(module, nn.MultiheadAttention):
            # Its one operation takes the output projection's parameters, too.
            members += [p for child in module.modules() if child is not module for p in owners.get(child, [])]
        units = [p.unit for p in members if p.whole is None] + ([first[module]] if module in first else [])
        tiles = [[p.unit] for p in members if p.whole is not None]
        # Of its tiles one at a time.
        together += [list(dict.fromkeys([*tile, *units])) for tile in tiles or [[]]]
    return together


def _parts_of(parameter: nn.Parameter) -> Sequence[ManagedParameter | nn.Parameter]:
    """Those that norms of its gradient are known of."""
    managed = parked.managed(parameter)
    return managed.parts if managed is not None else [parameter]


def _is_copied(unit: Unit) -> bool:
    """Whether modules on the CPU see a copy of it."""
    return unit.compute_dtype != unit.dtype or unit.is_stored_in_parts


def _copy_budget(units: Sequence[Unit], together: Sequence[Sequence[Unit]], memory: int) -> int:
    """Room for copies in another dtype than is stored, and for whole units of which a part is stored."""
    sizes = [copy_size(unit) for unit in units if _is_copied(unit)]
    if not sizes:
        return 0
    at_once = max(sum(copy_size(unit) for unit in group if _is_copied(unit)) for group in together)
    share = _GATHER_SHARE if any(unit.is_stored_in_parts for unit in units) else _COPY_SHARE
    return max(at_once + max(sizes), min(sum(sizes), round_up(int(memory * share))))


def _bucket_bytes(memory: int) -> int:
    """Of rows that leave, and as much for rows that come in: constant, whatever the model."""
    return max(_MIN_BUCKET_BYTES, min(_MAX_BUCKET_BYTES, round_up(memory // _BUCKETS_IN_MEMORY)))


def _ranks_of(model: nn.Module) -> RankGroup | None:
    """The ranks that the model was built on, by `zi.init`."""
    known = (parked.managed(parameter) for parameter in model.parameters())
    return next((host_of(m).ranks for m in known if m is not None), None)
