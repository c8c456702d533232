"""`zi.init`: builds a model whose parameters move into blocks layer by layer, so it is never whole in memory.

`from_pretrained` of transformers constructs on the meta device, then sets each parameter to one with the values of the
file: parameters without values are passed over, and those that replace them are taken in as they arrive. While a model
is built, transformers reads one tensor at a time (`hugging_face_loading.py`).

Every parameter that a module registers is recorded. When the next module but one registers its first parameter, the
recorded ones are moved into blocks and offloaded. (Not sooner: nn.MultiheadAttention registers a bias after its inner
projection's.) A layer that takes more than half of the memory is split into tiles as soon as its weight is registered,
before it has values: so it is never whole, and `nn.init` fills it tile by tile (`tiling/tiled_init.py`). Later accesses
of the constructor (tying, a second initialisation of all modules at the end) go through `OffloadedParameter`, so the
values are those of a plain construction with the same seed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from zero_infinity.byte_sizes import format_bytes, suggest_bytes
from zero_infinity.comm.process_group import RankGroup
from zero_infinity.config import Config
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.errors import CapacityError, UsageError
from zero_infinity.params import offloaded_param
from zero_infinity.params.find_parameters import manageable, own_parameters
from zero_infinity.params.packed_layers import HOLDER, is_quantised, pack
from zero_infinity.params.parameter_store import ParameterStore, budget_of
from zero_infinity.params.precision import Precision, precision_of
from zero_infinity.params.saved_tensors import SavedTensorHooks
from zero_infinity.params.state_dict import attach_state_dict_hooks
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit
from zero_infinity.params.unit_access import UnitAccess
from zero_infinity.params.unit_values import CopiedValues
from zero_infinity.params.unshard import Unsharder
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.homes import Home, home_while_building
from zero_infinity.policy.memory_budget import room_while_building
from zero_infinity.storage.heap import trim_heap
from zero_infinity.tiers.compute_device import CpuDevice, memory_of
from zero_infinity.tiers.device_cache import DeviceCache, make_device_cache
from zero_infinity.tiers.host_cache import SpareBytes
from zero_infinity.tiling.materialize import Materializer
from zero_infinity.tiling.tile_plan import Tiling, cut, is_tileable
from zero_infinity.tiling.tiled_ops import TiledWeight

# Constructions in progress, the innermost last: only that one takes parameters.
_under_way: list[DeferredInit] = []


def under_way() -> DeferredInit | None:
    """Return the construction in progress."""
    return _under_way[-1] if _under_way else None


class DeferredInit:
    """Moves parameters into a store while a model is built. Also the hook that torch calls at each registration."""

    def __init__(self, config: Config, ranks: RankGroup | None, parts: EngineParts = DEFAULT_PARTS) -> None:
        self.parameter_store = ParameterStore(config, ranks, budget_of(config, ranks), parts)
        self.is_finished = False  # one of its models is prepared
        self._cache: DeviceCache | None = None  # of unsharded units, where each rank stores a shard
        self._gathered: CopiedValues | None = None
        self._open: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._budget = self.parameter_store.store.pool.budget  # for blocks
        self._common_budget = self._budget  # the smallest of all ranks: all must split layers alike
        store = self.parameter_store
        self._sources = store.sources
        access = UnitAccess(store.compute_thread, self._sources, store.storages, self)
        self._unsharder = Unsharder(self, access, SavedTensorHooks(access))
        allocate = memory_of(store.store.pool)
        self._materializer = Materializer(access, store.host_cache, allocate, SpareBytes(0), self._budget)
        self._gather_bytes = 0  # for unsharded units
        self._resident_bytes = 0
        self._untrimmed_bytes = 0

    def begin(self) -> None:
        _under_way.append(self)
        ranks = self.parameter_store.ranks
        if ranks is not None:
            self._common_budget = ranks.phases.smallest("the memory of zi.init", self._budget)
            # Each rank computes every value and keeps its shard, so all ranks must draw the same random numbers.
            ranks.phases.all_same(
                "the random state before zi.init", _random_state(), "same torch.manual_seed(...) on every rank"
            )
            if self.parameter_store.sharding.stage == 3:
                self._cache = self._make_cache(ranks)

    def end(self) -> None:
        _under_way.remove(self)

    def check_same_config(self, config: Config) -> None:
        """Raise if a `zi.init` inside this one has other settings."""
        if config != self.parameter_store.config:
            raise UsageError(
                "zi.init inside zi.init has another config: parts of one model have one budget and one place\n"
                "  fix:   the same zi.Config in both, or no inner zi.init"
            )

    def _make_cache(self, ranks: RankGroup) -> DeviceCache:
        """Unsharded units, for constructors that access a layer after it was sharded."""
        # The same on every rank, because it decides what is gathered again.
        budget = self._gather_bytes = room_while_building(self._common_budget)
        self.parameter_store.store.pool.charge(budget)
        self._budget -= budget
        self.parameter_store.host_cache.limit(self._budget, 0)
        cache = make_device_cache(
            self.parameter_store.host_cache,
            CpuDevice(budget),
            self.parameter_store.parts.make_policy,
            budget,
            0,
            channel=ranks.channel("construction"),
        )
        self._gathered = CopiedValues(cache, None)
        self.parameter_store.closers.append(cache.copier.close)
        return cache

    def finish(self) -> None:
        """A model is about to be prepared: release what only the construction needed."""
        self.is_finished = True
        self._materializer.write_home()
        if self._cache is not None:
            self._cache.copier.close()
            self.parameter_store.store.pool.discharge(self._gather_bytes)

    # ------------------------------------------------------------------ the owner and observer of its parameters

    def before_reads(self, unit: Unit) -> None:
        """Nothing to do: nothing is updated before training."""

    def on_read(self, unit: Unit) -> None:
        """Nothing to do: reads have no order before training."""

    def on_edit(self, parameter: ManagedParameter, flat: torch.Tensor) -> None:
        """Nothing to do: there are no master weights before training."""

    def on_copy(self, original: ManagedParameter, copy: nn.Parameter) -> None:
        """Layers are often made by copying the first one: a copy is never registered, but is offloaded the same way."""
        if self not in _under_way:
            return
        if original.tiles:
            self._cut(original.unit.name, original.name, copy, original.tiles[0].shape[0])
        else:
            self._move_in(original.unit.name, [(original.name, copy)], copy.dtype)

    def showing_gradients(self, parameters: Sequence[ManagedParameter]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Nothing to do: there are no gradients before training."""
        return nullcontext()

    @property
    def edit_channel(self) -> None:
        """No edits are shared: every rank computes the same values, which `close` checks."""
        return

    # ------------------------------------------------------------------ registrations

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or _under_way[-1] is not self:
            return
        quantised = is_quantised(parameter)
        if not quantised and not _is_taken(parameter):
            return
        if module not in self._open and len(self._open) > 1:
            self._close_all_but_last()
        if quantised:  # packed when the module is closed, together with its scales
            self._open.setdefault(module, {})
            return
        num_rows = self._rows_of_a_tile(module, name, parameter)
        if num_rows is None:
            self._open.setdefault(module, {})[name] = parameter
        else:
            self._cut(type(module).__name__, f"{type(module).__name__}.{name}", parameter, num_rows)
            attach_state_dict_hooks(module, self.parameter_store.state_dicts)

    def _rows_of_a_tile(self, module: nn.Module, name: str, parameter: nn.Parameter) -> int | None:
        """Return rows per tile, as in `prepare`; None if it stays whole (by default: up to half of the memory)."""
        config = self.parameter_store.config
        if name != "weight" or not is_tileable(module, parameter):
            return None
        precision = precision_of(parameter.dtype, config, torch.device("cpu"), fast=False)
        if config.tile_above is not None:
            tiling = Tiling(config.tile_above)
        elif config.nvme and 2 * parameter.nbytes > self._common_budget:
            tiling = Tiling.by_default(self._common_budget)
        else:
            return None
        return tiling.rows(f"{type(module).__name__}.{name}", parameter.shape, precision)

    def _cut(self, unit_name: str, name: str, parameter: nn.Parameter, num_rows: int) -> None:
        dtype = parameter.dtype
        whole = cut(
            unit_name,
            name,
            parameter,
            num_rows,
            precision=Precision(dtype, dtype, dtype, dtype, has_master=False),
            device=torch.device("cpu"),
            numbers=itertools.count(self.parameter_store.num_units),
            sharding=self.parameter_store.sharding,
        )
        for tile in whole.tiles:
            self._take_in(tile.unit)
        self._sources.serve(whole.unit, self._materializer)
        whole.use_tiles(TiledWeight(whole, self._unsharder, self._materializer))
        self.parameter_store.offload(whole.tiles[0].unit, self._unsharder)

    def registered(self, _: nn.Module, __: str, child: nn.Module | None) -> None:
        """A module got a complete child, possibly a copied one that never registered parameters."""
        if child is None or _under_way[-1] is not self:
            return
        for module in child.modules():
            self._open.pop(module, None)
            self._close(module, {name: p for name, p in own_parameters(module).items() if _is_taken(p)})

    def _close_all_but_last(self) -> None:
        *old, last = self._open.items()
        self._open = dict([last])
        for module, parameters in old:
            self._close(module, parameters)

    def close_modules(self) -> None:
        """Move in the recorded parameters."""
        noted, self._open = self._open, {}
        for module, parameters in noted.items():
            self._close(module, parameters)

    def close(self) -> None:
        """Move in the recorded parameters, and check that all ranks have drawn the same random numbers."""
        self.close_modules()
        if self.parameter_store.ranks is not None:
            self.parameter_store.ranks.phases.all_same(
                "the random state after zi.init", _random_state(), "build the same model on every rank"
            )

    def _close(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        own = own_parameters(module)
        for name, parameter in parameters.items():
            # It may have been replaced in the meantime, or be managed under another name.
            if own.get(name) is parameter and offloaded_param.managed(parameter) is None:
                by_dtype.setdefault(parameter.dtype, []).append((f"{type(module).__name__}.{name}", parameter))
        for dtype, members in by_dtype.items():
            self._move_in(type(module).__name__, members, dtype)
        holder = pack(module, torch.device("cpu"))
        if holder is not None and offloaded_param.managed(holder) is None:
            name = type(module).__name__
            self._move_in(name, [(f"{name}.{HOLDER}", holder)], holder.dtype)
        attach_state_dict_hooks(module, self.parameter_store.state_dicts)

    def _move_in(self, name: str, members: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        unit = make_unit(
            name,
            members,
            dtype=dtype,
            compute_dtype=dtype,
            device=torch.device("cpu"),
            number=self.parameter_store.num_units,
            sharding=self.parameter_store.sharding,
        )
        self._take_in(unit)
        self.parameter_store.offload(unit, self._unsharder)

    def _take_in(self, unit: Unit) -> None:
        """Create a unit's block and fill it with values."""
        self.parameter_store.num_units += 1
        nvme, budget = bool(self.parameter_store.config.nvme), self._budget
        size = round_up(unit.stored_bytes)
        home = home_while_building(unit.stored_bytes, self._resident_bytes, budget, nvme=nvme)
        if size + (self._resident_bytes if home is Home.RAM else 0) > budget:
            raise _too_large(unit, size, self._resident_bytes, budget, nvme=nvme)
        if home is Home.RAM:
            self._resident_bytes += size
            self.parameter_store.host_cache.limit(budget - self._resident_bytes, 0)
        self.parameter_store.add(unit, home)
        if self._cache is not None and self._gathered is not None:
            self._cache.add(unit)
            self._sources.serve(unit, self._gathered)
        self.parameter_store.fill(unit)
        self._untrimmed_bytes += size
        if self._untrimmed_bytes > budget // 4:
            trim_heap()
            self._untrimmed_bytes = 0


def _is_taken(parameter: nn.Parameter) -> bool:
    """True if it has values that are not in a block yet."""
    if nn.parameter.is_lazy(parameter) or offloaded_param.managed(parameter) is not None:
        return False
    return not parameter.is_meta and manageable(parameter)


def _random_state() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


def _too_large(unit: Unit, size: int, resident: int, budget: int, *, nvme: bool) -> CapacityError:
    listed = ", ".join(f"{managed.name} {tuple(managed.shape)}" for managed in unit.parameters)
    if nvme:
        return CapacityError(
            f"{listed} needs {format_bytes(size)} of host memory to be built, but memory is {format_bytes(budget)}\n"
            f"  fix:   memory={suggest_bytes(2 * size)}"
        )
    return CapacityError(
        f"with {listed} the model's parameters take {format_bytes(resident + size)} so far, but memory is "
        f"{format_bytes(budget)} and there is no nvme to put the rest on\n"
        f'  fix:   nvme="/path/on/a/drive", or more memory'
    )
